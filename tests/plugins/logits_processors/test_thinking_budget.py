"""Thinking budgets through the whole engine: exact, and the same however a row is run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from modulm import LLM, EngineConfig, SamplingParams, StructuredOutputs
from modulm.errors import ConfigError, RequestError
from modulm.plugins import manager
from modulm.plugins.manager import PluginManager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.drafters import FakeDrafter, drafting_executor, mixed
from modulm_frontend.validation import check
from modulm_logits_thinking_budget.processor import Reading, Row, ThinkingBudget
from modulm_tokenizers.tokenizer import load_tokenizer

THINKING = "<|im_start|>assistant\n<think>\n"
SHARED = "One two three four five six seven eight nine ten. " * 3
PROMPTS = [f"Question {place}? {SHARED if place % 2 else ''}{THINKING}" for place in range(8)]
BUDGETS = [0, 1, 5, 9, None, 3, 12, 7]
FINAL = "<|start|>assistant<|channel|>final<|message|>"
GRANITE = "Here is my thought process:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("budgets") / "tiny")


@pytest.fixture(scope="module")
def ids(folder: Path) -> tuple[int, int]:
    """What opens a thought, and what closes it."""
    added = load_tokenizer(folder).added_tokens
    return added["<think>"], added["</think>"]


@contextmanager
def opened(folder: Path, drafter: FakeDrafter | None = None, **flags: Any) -> Iterator[LLM]:
    more = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes", "cpu_threads": 1, **flags}
    more.setdefault("num_gpu_blocks_override", 200)
    with manager.using(PluginManager()) as plugins:
        if drafter is not None:
            plugins.register("executors", "drafting", drafting_executor(drafter))
            more["distributed_executor_backend"] = "drafting"
        with LLM(str(folder), dtype="float32", block_size=16, max_model_len=256, **more) as llm:
            yield llm


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with opened(folder) as engine:
        yield engine


def thinking(budget: int | None, **more: Any) -> SamplingParams:
    settings = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, **more}
    return SamplingParams(thinking_token_budget=budget, **settings)


def tokens(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [choice.finish_reason for out in outputs for choice in out.outputs].count("error") == 0
    return [list(choice.token_ids) for output in outputs for choice in output.outputs]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    """The answers to PROMPTS with BUDGETS, one at a time."""
    return [
        tokens(llm, prompt, thinking(budget))[0]
        for prompt, budget in zip(PROMPTS, BUDGETS, strict=True)
    ]


def test_a_thought_has_as_many_tokens_as_its_budget(
    llm: LLM, expected: Sequence[list[int]], ids: tuple[int, int]
) -> None:
    free = tokens(llm, PROMPTS, thinking(None))
    assert not any(ids[1] in answer for answer in free)
    for answer, plain, budget in zip(expected, free, BUDGETS, strict=True):
        if budget is None:
            assert answer == plain
        else:
            assert answer[: budget + 1] == [*plain[:budget], ids[1]]
            assert len(answer) == 24


@pytest.mark.exhaustive
def test_it_is_the_same_however_it_is_run(
    folder: Path, llm: LLM, expected: list[list[int]]
) -> None:
    """Together, with known prefixes, preempted, planned ahead, and with drafts."""
    pytest.importorskip("modulm_kernels_cpu", reason="no compiled CPU kernels")
    params = [thinking(budget) for budget in BUDGETS]
    assert tokens(llm, PROMPTS, params) == expected
    assert tokens(llm, PROMPTS, params) == expected
    few = {"max_num_seqs": 4, "num_gpu_blocks_override": 17, "max_num_batched_tokens": 32}
    with opened(folder, async_scheduling=True, **few) as other:
        assert tokens(other, PROMPTS, params) == expected
    prompts = [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS]
    whole = [[*prompt, *answer] for prompt, answer in zip(prompts, expected, strict=True)]
    drafter = FakeDrafter(mixed, whole)
    with opened(folder, drafter) as drafted:
        assert tokens(drafted, PROMPTS, params) == expected
    assert drafter.ran


def test_choices_have_budgets_of_their_own(llm: LLM, ids: tuple[int, int]) -> None:
    params = thinking(4, n=3, temperature=1.3, seed=1)
    answers = tokens(llm, PROMPTS[0], params)
    assert len({tuple(answer) for answer in answers}) == 3
    assert [answer.index(ids[1]) for answer in answers] == [4, 4, 4]


def test_a_grammar_begins_where_the_thought_was_ended(llm: LLM, ids: tuple[int, int]) -> None:
    constraint = StructuredOutputs(regex=r"\d{4}")
    for budget in (0, 6):
        (answer,) = tokens(
            llm, PROMPTS[0], thinking(budget, structured_outputs=constraint, ignore_eos=False)
        )
        assert answer[budget] == ids[1]
        text = llm.get_tokenizer().decode(answer[budget + 1 :])
        assert len(text) == 4
        assert text.isdigit()


def test_thoughts_that_the_model_opens_share_one_budget(llm: LLM, ids: tuple[int, int]) -> None:
    begin, end = ids
    eager = thinking(3, logit_bias={begin: 100.0}, max_tokens=11)
    (answer,) = tokens(llm, "Question?", eager)
    assert answer == [begin] * 4 + [end, begin, end, begin, end, begin, end]


def test_nothing_keeps_a_thought_from_ending(llm: LLM, ids: tuple[int, int]) -> None:
    hindered = [
        thinking(2, bad_words=("</think>",)),
        thinking(2, allowed_token_ids=(40, 41, 42)),
        thinking(2, min_tokens=20, stop_token_ids=(ids[1],)),
        thinking(2, logit_bias={ids[1]: -100.0}),
        thinking(2, temperature=1.5, seed=3, top_k=2, repetition_penalty=1.5),
    ]
    answers = tokens(llm, PROMPTS[: len(hindered)], hindered)
    assert [answer.index(ids[1]) for answer in answers] == [2] * len(hindered)


def test_the_probability_of_a_forced_token_is_the_models(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], thinking(1, logprobs=2), use_tqdm=False)
    choice = output.outputs[0]
    assert choice.logprobs is not None
    forced = choice.logprobs[1][choice.token_ids[1]]
    assert -60 < forced.logprob < -1
    assert (forced.rank or 0) > 1


def test_an_ending_of_several_tokens(folder: Path) -> None:
    with opened(folder, reasoning_parser="granite") as llm:
        ending = llm.get_tokenizer().encode("Here is my response:", add_special_tokens=False)
        assert len(ending) > 3
        for budget in (0, 5):
            (answer,) = tokens(llm, f"Question? {GRANITE}", thinking(budget, max_tokens=60))
            assert answer[budget : budget + len(ending)] == ending
            assert answer[budget + len(ending) : budget + 2 * len(ending)] != ending


def test_words_of_farewell_and_no_parser(folder: Path, ids: tuple[int, int]) -> None:
    strings = {"reasoning_start_str": "<think>", "reasoning_end_str": " so be it</think>"}
    with opened(folder, reasoning_parser=None, reasoning_config=strings) as llm:
        farewell = llm.get_tokenizer().encode(" so be it", add_special_tokens=False)
        (answer,) = tokens(llm, PROMPTS[0], thinking(4))
        assert answer[4 : 4 + len(farewell) + 1] == [*farewell, ids[1]]


def config(**flags: Any) -> EngineConfig:
    return EngineConfig.from_keywords(**flags)


@pytest.mark.parametrize(
    "strings",
    [
        {"reasoning_start_str": "<thought>"},
        {"reasoning_start_str": "<think>", "reasoning_end_str": "</thought>"},
        {"reasoning_end_str": "enough"},
    ],
)
def test_strings_that_the_parser_does_not_read_are_refused(strings: dict[str, str]) -> None:
    engine_config = config(reasoning_parser="qwen3", reasoning_config=strings)
    with pytest.raises(ConfigError, match="reasoning parser qwen3"):
        ThinkingBudget.open(engine_config, 512, torch.device("cpu"))


@pytest.mark.parametrize(
    ("parser", "strings"),
    [
        ("qwen3", {"reasoning_start_str": "<think>", "reasoning_end_str": "So.</think>"}),
        ("qwen3", {"reasoning_end_str": "So be it.\n</think>\n\n"}),
        ("granite", {"reasoning_end_str": "Here's my response:"}),
        ("openai_gptoss", {"reasoning_end_str": f"<|end|>{FINAL}"}),
        ("box", {"reasoning_start_str": "a", "reasoning_end_str": "b"}),
    ],
)  # fmt: skip
def test_strings_that_it_reads_are_taken(parser: str, strings: dict[str, str]) -> None:
    engine_config = config(
        reasoning_parser=None if parser == "box" else parser, reasoning_config=strings
    )
    ThinkingBudget.open(engine_config, 512, torch.device("cpu"))


@pytest.mark.parametrize("budget", [-2, 1.5, True, "5"])
def test_other_values_are_refused(llm: LLM, budget: Any) -> None:
    with pytest.raises(RequestError, match="thinking_token_budget") as caught:
        llm.generate(PROMPTS[0], thinking(budget), use_tqdm=False)
    assert caught.value.param == "thinking_token_budget"


def test_minus_one_is_no_bound(llm: LLM, ids: tuple[int, int]) -> None:
    assert ids[1] not in tokens(llm, PROMPTS[0], thinking(-1))[0]


@pytest.mark.parametrize("parser", [None, "minimax_m2_append_think"])
def test_without_a_parser_that_tells_it_is_refused(parser: str | None) -> None:
    engine_config = config(reasoning_parser=parser)
    with pytest.raises(RequestError, match="reasoning") as caught:
        ThinkingBudget.validate_for(thinking(5), engine_config)
    assert caught.value.param == "thinking_token_budget"
    for params in (thinking(-1), thinking(None)):
        ThinkingBudget.validate_for(params, engine_config)


def test_without_the_package_it_is_refused() -> None:
    with pytest.raises(RequestError, match="pip install modulm-logits-thinking-budget"):
        check(thinking(5), vocabulary=512, max_model_len=64, config=config())


def test_an_ending_that_the_model_has_begun_is_not_begun_again(folder: Path) -> None:
    """Where the marker is several tokens, the rest of it is forced."""
    engine_config = config(model=str(folder), reasoning_parser="granite")
    reading = Reading(engine_config, 512)
    ending = reading.tokenizer.encode("Here is my response:", add_special_tokens=False)
    prompt = reading.tokenizer.encode(f"Question? {GRANITE}")
    row = Row(reading, 4, reading.parser(prompt))
    output = [40, 41, *ending[:2]]
    assert [row.forced(output[:count]) for count in range(4)] == [None] * 4
    for token in ending[2:]:
        assert row.forced(output) == token
        output.append(token)
    assert row.forced(output) is None
    assert row.forced([*output, 42]) is None


def test_a_front_end_that_checks_budgets_does_not_import_torch() -> None:
    """It would take a second of every start, and 130 MB."""
    code = (
        "import sys; from modulm.config import EngineConfig\n"
        "from modulm_server.engine.processors import installed_processors\n"
        "names = [cls.__name__ for cls in installed_processors(EngineConfig())]\n"
        "print('ThinkingBudget' in names, *{'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]
