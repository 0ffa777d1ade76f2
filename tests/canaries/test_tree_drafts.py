"""Drafts as a tree, by a package outside the core: the tokens are those of single steps."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from samples import parametrize_sample
from tests.canaries.tree_drafts import Tree, TreeDrafts

from modulm import LLM, SamplingParams
from modulm.errors import UnsupportedError
from modulm.plugins.manager import PluginManager, current, using
from modulm.testing.checkpoints import make_tiny
from modulm.testing.engines import check_empty

PROMPTS = [[5, 99, 7, 30], [17], [8] * 21, [7, 9, 11, 13] * 9, [3, 4, 5], [6, 7], [30, 31, 32]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SETTINGS = {
    "attention_backend": "sdpa",
    "kernels": "none",
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_batched_tokens": 96,
    "block_size": 8,
    "disable_frontend_multiprocessing": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("trees"), "LlamaForCausalLM"))


@pytest.fixture
def plugins() -> Iterator[PluginManager]:
    with using(PluginManager()) as manager:
        yield manager


class Counter:
    """Adds up what the steps of an engine count."""

    def __init__(self) -> None:
        self.steps: list[Any] = []

    def step(self, stats: Any) -> None:
        self.steps.append(stats)

    def total(self, name: str) -> int:
        return sum(getattr(stats, name) for stats in self.steps)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **keywords: None


def tokens_of(llm: LLM, params: SamplingParams | list[SamplingParams] = GREEDY) -> list:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)]


def with_trees(references: Sequence[Sequence[int]]) -> type[TreeDrafts]:
    """A part whose trees hold some of the tokens that will follow, behind wrong siblings."""

    def propose(self: TreeDrafts, history: np.ndarray) -> Tree:
        known = history.tolist()
        whole = next((r for r in references if list(r[: len(known)]) == known), ())
        draw, tree, parent = random.Random(str(known)), [], 0
        for token in whole[len(known) : len(known) + draw.randint(1, 5)]:
            wrong = (token + 1 + draw.randrange(50)) % 500
            tree += [(wrong, parent)] * draw.randint(0, 1)
            tree.append((token, parent))
            parent = len(tree)
        return tree

    return type("Trees", (TreeDrafts,), {"propose": propose})


def opened(folder: str, expected: Sequence[Sequence[int]] | None, **settings: Any) -> LLM:
    """An engine whose trees hold the expected tokens; None: without trees."""
    if expected is not None:
        whole = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, expected, strict=True)]
        current().register("step_parts", TreeDrafts.name, with_trees(whole))
    return LLM(folder, **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def expected(folder: str) -> list[Any]:
    with using(PluginManager()), opened(folder, None) as llm:
        return tokens_of(llm)


@parametrize_sample(
    "settings", [{}, {"async_scheduling": True}, {"batch_invariant": True}], every=3
)
def test_trees_change_nothing_but_the_number_of_steps(folder, plugins, expected, settings) -> None:
    counter = Counter()
    with opened(folder, expected, **settings) as llm:
        llm.count_by(counter)
        assert tokens_of(llm) == expected
        assert tokens_of(llm) == expected, "with prefixes that were found again"
    assert counter.total("hit") > 0
    assert counter.total("accepted") > 1.5 * counter.total("drafts")


def test_every_way_to_sample(folder, plugins, expected) -> None:
    params = [
        GREEDY.with_(logprobs=2),
        SamplingParams(temperature=0.7, seed=3, max_tokens=20, ignore_eos=True),
        GREEDY.with_(repetition_penalty=1.3),
        SamplingParams(temperature=0, max_tokens=1),
        GREEDY.with_(stop_token_ids=expected[4][5:6], ignore_eos=False),
        GREEDY.with_(min_tokens=5),
        GREEDY,
    ]
    with using(PluginManager()), opened(folder, None) as plain:
        single = tokens_of(plain, params)
    with opened(folder, expected) as llm:
        assert tokens_of(llm, params) == single


def test_few_blocks(folder, plugins, expected) -> None:
    counter = Counter()
    with opened(folder, expected, num_gpu_blocks_override=17) as llm:
        llm.count_by(counter)
        assert tokens_of(llm) == expected
        check_empty(llm._core.loop)
    assert counter.total("preempted") > 0
    assert counter.total("accepted") > counter.total("drafts")


def test_aborts_leave_nothing_behind(folder, plugins, expected) -> None:
    draw = random.Random(5)
    with opened(folder, expected, num_gpu_blocks_override=20) as llm:
        loop = llm._core.loop
        for _ in range(4):
            pending = [
                llm._input_processor.process({"prompt_token_ids": prompt}, GREEDY, f"r{number}")
                for number, prompt in enumerate(PROMPTS)
            ]
            for each in pending:
                llm._output_processor.add(each.state)
                llm._core.submit(*each.requests)
            while loop.busy:
                loop.tick()
                gone = draw.choice(pending).state
                if draw.random() < 0.3 and not gone.finished:
                    for identity in llm._output_processor.abort(gone):
                        loop.abort(identity)
            loop.tick()
            check_empty(loop)
        assert tokens_of(llm) == expected


@pytest.mark.parametrize(
    ("architecture", "settings", "why"),
    [
        ("LlamaForCausalLM", {"attention_backend": "flash_attn"}, "does not do masks"),
        ("Gemma2ForCausalLM", {}, "cannot mask tokens of a step with window"),
        ("Mamba2ForCausalLM", {}, "a recurrent state needs all tokens in order"),
    ],
)
def test_what_cannot_mask_says_so(tmp_path, plugins, architecture, settings, why) -> None:
    folder = make_tiny(tmp_path / "tiny", architecture)
    with pytest.raises(UnsupportedError, match=why):
        opened(str(folder), [()] * len(PROMPTS), **settings)
