"""Thoughts of earlier turns reach a template once, in the form that it reads."""

from __future__ import annotations

from typing import Any

import pytest

from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import RequestError
from modulm.testing.checkpoints import make_tokenizer
from modulm_chat import render
from modulm_tokenizers.tokenizer import load_tokenizer


def reading_template(name: str) -> str:
    return (
        "{% for m in messages %}{{ m.role }}:{% if m." + name + " %}({{ m." + name + " }})"
        "{% endif %}{{ m.content }};{% endfor %}"
    )


FIELDS = {
    name: reading_template(name) for name in ("reasoning_content", "reasoning", "thinking")
} | {
    "key": reading_template("role").replace("m.role }}:", "m.role }}:").replace(
        "{% if m.role %}({{ m.role }})", "{% if m['reasoning'] %}({{ m['reasoning'] }})"
    ),
    "asked": "{% for m in messages %}{{ m.role }}:{% if 'reasoning_content' in m %}"
    "({{ m.reasoning_content }}){% endif %}{{ m.content }};{% endfor %}",
    "either": "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}"
    "({{ m.reasoning_content }}){% elif '</think>' in m.content %}"
    "({{ m.content.split('</think>')[0] }}){% endif %}{{ m.content }};{% endfor %}",
}  # fmt: skip
INLINE = (
    "{% for m in messages %}{{ m.role }}:{% if '</think>' in m.content %}"
    "({{ m.content.split('</think>')[0].split('<think>')[1].strip() }})"
    "{{ m.content.split('</think>')[1].strip() }}{% else %}{{ m.content }}{% endif %};{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{% if p.type == 'thinking' %}"
    "({{ p.thinking }}){% else %}{{ p.text }}{% endif %}{% endfor %};{% endfor %}"
)
DEAF = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}<think></think>"
THOUGHT = {"type": "thinking", "thinking": "Hm."}
#: Ways in which clients write the same turn.
WRITTEN: dict[str, dict[str, Any]] = {
    "reasoning_content": {"reasoning_content": "Hm.", "content": "Yes."},
    "reasoning": {"reasoning": "Hm.", "content": "Yes."},
    "both": {"reasoning": "Hm.", "reasoning_content": "Hm.", "content": "Yes."},
    "one is null": {"reasoning": None, "reasoning_content": "Hm.", "content": "Yes."},
    "part": {"content": [THOUGHT, {"type": "text", "text": "Yes."}]},
    "listed": {"content": [{**THOUGHT, "thinking": [{"type": "text", "text": "Hm."}]}, "Yes."]},
    "part and field": {"reasoning": "Hm.", "content": [THOUGHT, "Yes."]},
    "inline and field": {"reasoning": "Hm.", "content": "<think>\nHm.\n</think>\n\nYes."},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("thoughts")))


def rendered(tokenizer: Tokenizer, template: str, turn: dict[str, Any]) -> str:
    messages = [{"role": "user", "content": "Well?"}, {"role": "assistant", **turn}]
    return render(messages, tokenizer=tokenizer, template=template)


@pytest.mark.parametrize("template", [*FIELDS.values(), INLINE, PARTS])
@pytest.mark.parametrize("turn", WRITTEN.values(), ids=list(WRITTEN))
def test_however_it_is_written_it_is_told_once(
    tokenizer: Tokenizer, template: str, turn: dict[str, Any]
) -> None:
    assert rendered(tokenizer, template, turn) == "user:Well?;assistant:(Hm.)Yes.;"


def test_a_template_that_reads_no_thoughts_is_told_none(tokenizer: Tokenizer) -> None:
    for turn in WRITTEN.values():
        assert rendered(tokenizer, DEAF, turn) == "user:Well?;assistant:Yes.;<think></think>"


def test_what_is_written_inline_alone_stays(tokenizer: Tokenizer) -> None:
    inline = {"content": "<think>Hm.</think>Yes."}
    assert rendered(tokenizer, INLINE, inline) == "user:Well?;assistant:(Hm.)Yes.;"
    assert "<think>Hm.</think>Yes." in rendered(tokenizer, FIELDS["reasoning"], inline)


@pytest.mark.parametrize(
    "turn", [{"reasoning": 5}, {"content": [{"type": "thinking", "thinking": [5]}]}]
)
def test_a_thought_is_text(tokenizer: Tokenizer, turn: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"messages\[1\]") as caught:
        rendered(tokenizer, DEAF, turn)
    assert caught.value.param == "messages"
