"""What every reasoning parser knows of thinking: how it ends, and what templates are told."""

from __future__ import annotations

from typing import Any

import pytest

from modulm.contracts.parser import Content, Example, Reasoning, ReasoningParser
from modulm.errors import RequestError
from modulm.plugins import manager
from modulm_parsing import EFFORTS, thinking_variables

NAMES = [declaration.name for declaration in manager.current().names("reasoning_parsers")]
KINDS: dict[str, type[ReasoningParser]] = {
    name: manager.current().load("reasoning_parsers", name) for name in NAMES
}
EXAMPLES = [
    (name, example)
    for name, kind in KINDS.items()
    if kind.tells_end
    for example in kind.examples
    if example.reasoning == "Hm." and example.content in ("Hi", None)
]
#: What the answer to a question begins with, in formats where that is not the text itself.
HEADERS = {
    "beam": "<|channel|>final<|message|>",
    "kimi_k3": "<|open|>response<|sep|>",
    "muse": " to=user<|message|>",
    "muse_glimmer": " to=user<|message|>",
    "openai_gptoss": "<|channel|>final<|message|>",
}


def joined_text(events: list[Any], kind: type) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_a_thought_ends_as_the_parser_says(name: str, example: Example) -> None:
    parser = KINDS[name](example.context)
    at = example.text.index("Hm.") + len("Hm")
    events = parser.feed(example.text[:at])
    ending = parser.reasoning_end
    assert ending
    events += parser.feed(ending)
    events += parser.feed(HEADERS.get(KINDS[name].name, "") + "Now, ")
    assert parser.reasoning_end is None
    events += parser.feed("then.") + parser.finish()
    assert joined_text(events, Reasoning) == "Hm"
    assert joined_text(events, Content) == "Now, then."


def test_all_but_those_that_split_nothing_tell_how_a_thought_ends() -> None:
    kinds_with_end = {name for name, kind in KINDS.items() if kind.tells_end}
    assert set(NAMES) - kinds_with_end == {"minimax_m2_append_think"}
    assert {name for name, _ in EXAMPLES} == kinds_with_end


@pytest.mark.parametrize("name", ["openai_gptoss", "beam", "muse_glimmer"])
def test_a_second_thought_ends_with_the_answers_header(name: str) -> None:
    example = next(e for e in KINDS[name].examples if e.reasoning == "Hm.")
    parser = KINDS[name](example.context)
    at = example.text.index("Hm.")
    assert parser.reasoning_end is None  # no thought has begun
    parser.feed(example.text[:at] + "x")
    parser.feed(str(parser.reasoning_end) + example.text[:at])
    ending = str(parser.reasoning_end)
    events = parser.feed(ending + "Answer.") + parser.finish()
    assert ending.endswith(HEADERS[name])
    assert joined_text(events, Content) == "Answer."


BOTH = {"enable_thinking": True, "thinking": True}
OFF = {"enable_thinking": False, "thinking": False}
TOLD: dict[str | None, dict[str | None, dict[str, Any]]] = {
    None: {"none": {**OFF, "reasoning_effort": "none"}, "low": {**BOTH, "reasoning_effort": "low"}},
    "qwen3": {"none": {**OFF, "reasoning_effort": "none"}},
    "openai_gptoss": {
        "none": {**OFF, "reasoning_effort": "low"},
        "medium": {**BOTH, "reasoning_effort": "medium"},
        "max": {**BOTH, "reasoning_effort": "high"},
    },
    "hy_v3": {
        "none": {"reasoning_effort": "no_think"},
        "medium": {"reasoning_effort": "high"},
        "low": {"reasoning_effort": "low"},
    },
    "mistral": {"none": {"reasoning_effort": "none"}, "low": {"reasoning_effort": "high"}},
    "minimax_m3": {
        "none": {"thinking_mode": "disabled", "reasoning_effort": "none"},
        "high": {"thinking_mode": "enabled", "reasoning_effort": "high"},
    },
    "seed_oss": {
        "none": {"thinking_budget": 0, "reasoning_effort": "none"},
        "high": {"reasoning_effort": "high"},
    },
    "deepseek_v4": {
        "none": OFF,
        "low": {**BOTH, "reasoning_effort": "high"},
        "max": {**BOTH, "reasoning_effort": "max"},
    },
}


@pytest.mark.parametrize(
    ("name", "effort"), [(name, effort) for name, efforts in TOLD.items() for effort in efforts]
)
def test_what_templates_are_told(name: str | None, effort: str) -> None:
    assert thinking_variables(name, effort) == TOLD[name][effort]


@pytest.mark.parametrize("name", NAMES)
def test_thinking_is_switched_without_an_effort(name: str) -> None:
    on, off = thinking_variables(name, thinks=True), thinking_variables(name, thinks=False)
    assert on != off
    assert thinking_variables(name) == {}
    for effort in EFFORTS:
        assert thinking_variables(name, effort)


def test_an_unknown_effort_is_refused() -> None:
    with pytest.raises(RequestError, match="one of none, minimal") as caught:
        thinking_variables("qwen3", "much", field="reasoning")
    assert caught.value.param == "reasoning"
