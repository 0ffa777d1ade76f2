"""Drafts in trees, on the attention backend that CPUs use by default."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from attrs import frozen
from safetensors.torch import load_file, save_file

from modulm import LLM, SamplingParams
from modulm.config import EngineConfig
from modulm.contracts.drafter import DraftStep
from modulm.errors import ConfigError
from modulm.testing.engines import check_empty
from modulm_demo import Demo
from modulm_speculation import Options, Speculator
from modulm_speculation.adaptive import Adaptive
from modulm_speculation.speculator import Branch
from modulm_speculation.step import tree
from modulm_speculation.step.part import DraftsPart
from modulm_speculation.step.planner import DraftPlanner
from modulm_speculator_dflash.speculator import DFlashOptions
from modulm_speculator_draft_model.speculator import DraftModelSpeculator
from modulm_speculator_eagle.speculator import Eagle
from modulm_speculator_medusa.speculator import Heads, Medusa, MedusaOptions

PROMPTS = [[300, 301, 302] * 10, [17, 40], [90, 30, 31, 7] * 9]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
#: Whole texts from which trees are made.
KNOWN: list[list[int]] = []
#: The text of `Comb`.
COMBED: list[int] = []


@frozen
class ForkedOptions(Options):
    trees: bool = True


class Forked(Speculator):
    """Drafts of which some are wrong; a branch beside each of these goes on as the text does."""

    name: ClassVar[str] = "forked"
    Config: ClassVar[type] = ForkedOptions
    cheap: ClassVar[bool] = True
    trees = True

    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        self._branches: list[list[Branch]] = []
        drafts = []
        for history in step.histories:
            known = history.tolist()
            text = next((t for t in KNOWN if t[: len(known)] == known), known)
            following = np.array(text[len(known) : len(known) + 4], dtype=np.int64)
            main, draw = following.copy(), random.Random(len(known))
            wrong = draw.randrange(4)
            main[wrong:] = main[wrong:] % 400 + 3
            drafts.append(main)
            branches = [(wrong, following[wrong : wrong + 3])] if wrong < len(main) else []
            self._branches.append([(0, np.array([5, 6])), *branches] if len(main) else [])
        return drafts

    def branches(self) -> Sequence[Sequence[Branch]]:
        return self._branches


def answers(params: SamplingParams = GREEDY, **flags: object) -> tuple[list, int]:
    """The tokens of all prompts, and how many steps they took."""
    settings = {"max_model_len": 128, "num_gpu_blocks_override": 30, **flags}
    with LLM("demo", **settings) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False
        )
        tokens = [output.outputs[0].token_ids for output in outputs]
        return tokens, llm._core.loop.scheduler.gauges().step


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[list, int]]:
    found = answers()
    KNOWN[:] = [[*p, *t] for p, t in zip(PROMPTS, found[0], strict=True)]
    yield found
    KNOWN.clear()


@pytest.mark.parametrize("more", [{"adaptive": False}, {}])
def test_branches_are_accepted(plain, more) -> None:
    table = {"method": "custom", "model": f"{__name__}:Forked", "num_speculative_tokens": 9, **more}
    tokens, steps = answers(speculative_config={**table, "trees": True})
    assert tokens == plain[0]
    if more:  # otherwise measured times say how much is drafted
        assert steps < 0.5 * plain[1], "a branch of three tokens behind each wrong draft"


def test_sampling_is_that_of_single_steps() -> None:
    sampled = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True, logprobs=2)
    table = {"method": "suffix", "trees": True}
    assert answers(sampled, speculative_config=table)[0] == answers(sampled)[0]


@pytest.mark.parametrize("more", [{}, {"presence_penalty": 0.5, "logprobs": 1}])
def test_sampled_tokens_choose_the_branch(more, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that are not the most likely ones go down branches as well."""
    sampled = SamplingParams(temperature=1.5, seed=5, max_tokens=30, ignore_eos=True, **more)
    tokens, steps = answers(sampled, dtype="float32")
    texts = [[*p, *t] for p, t in zip(PROMPTS, tokens, strict=True)]
    monkeypatch.setattr(f"{__name__}.KNOWN", texts)
    table = {"method": "custom", "model": f"{__name__}:Forked", "num_speculative_tokens": 9}
    table |= {"adaptive": False, "trees": True}
    found = answers(sampled, dtype="float32", speculative_config=table)
    assert found[0] == tokens
    assert found[1] < 0.5 * steps


def with_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify as many nodes as fit, whatever steps take."""
    monkeypatch.setattr(Adaptive, "_best", lambda self, rows, gains: len(gains))


def drafted(
    driver: type[Speculator], monkeypatch: pytest.MonkeyPatch, **table: object
) -> tuple[list, dict[tuple[int, ...], int], list]:
    """Tokens of all prompts, the first draft behind each text, and branches that were accepted."""
    firsts: dict[tuple[int, ...], int] = {}
    moved: list[object] = []
    plain, in_chains = driver.propose, tree._in_chains

    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        proposed = plain(self, step)
        for history, tokens in zip(step.histories, proposed, strict=True):
            if len(tokens):
                firsts[tuple(history.tolist())] = int(tokens[0])
        return proposed

    def counted(step, *more: np.ndarray):
        moved.append(step)
        return in_chains(step, *more)

    with monkeypatch.context() as patches:
        patches.setattr(driver, "propose", propose)
        patches.setattr(tree, "_in_chains", counted)
        with_all_nodes(patches)
        table = {"method": driver.name, "num_speculative_tokens": 6, **table}
        tokens, _ = answers(speculative_config=table)
    return tokens, firsts, moved


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_drafters_go_on_behind_branches_as_behind_chains(plain, monkeypatch, method, tmp_path):
    if method == "eagle":
        driver, model = Eagle, "demo-eagle"
    else:
        driver, model = DraftModelSpeculator, str(shaken(tmp_path))
    tokens, chains, _ = drafted(driver, monkeypatch, model=model)
    assert tokens == plain[0]
    tokens, trees, moved = drafted(driver, monkeypatch, model=model, trees=True)
    assert tokens == plain[0]
    assert moved, "branches were accepted"
    both = chains.keys() & trees.keys()
    assert len(both) > 10
    assert {text: chains[text] for text in both} == {text: trees[text] for text in both}


def shaken(folder: Path) -> Path:
    """The embedded model with noise in its weights, which is right now and then."""
    source = Path(Demo.source())
    shutil.copytree(source, folder / "draft")
    file = folder / "draft" / "model.safetensors"
    draw = torch.Generator().manual_seed(0)
    tensors = {
        name: tensor + 0.8 * tensor.float().std() * torch.randn(tensor.shape, generator=draw)
        if tensor.is_floating_point() and tensor.dim() == 2
        else tensor
        for name, tensor in load_file(file).items()
    }
    save_file({name: each.to(torch.bfloat16) for name, each in tensors.items()}, file)
    return folder / "draft"


def test_second_choices_of_heads_are_branches(monkeypatch) -> None:
    """Heads of Medusa: each one's two most probable tokens."""
    outputs = torch.eye(8)[[0, 1, 2]]
    heads = Heads([[], []], [outputs, outputs.flip(0)], None, SimpleNamespace())
    medusa = Medusa(MedusaOptions(model="x", trees=True), heads)
    hidden = torch.tensor([[3.0, 2, 1, 0, 0, 0, 0, 0]])
    step = SimpleNamespace(hidden=hidden, accepted=np.array([0]), most=[4], rows=[0])
    (chain,) = medusa.propose(step)
    assert (medusa.most, chain.tolist()) == (4, [0, 2])
    branches = [(depth, tokens.tolist()) for depth, tokens in medusa.branches()[0]]
    assert branches == [(0, [1]), (1, [1])]


def test_heads_of_whole_blocks_draft_chains() -> None:
    with pytest.raises(ConfigError, match="DFlash heads draft chains"):
        DFlashOptions(model="x", trees=True)


def test_trees_need_one_rank() -> None:
    config = EngineConfig.from_keywords(model="demo", tensor_parallel_size=2)
    built = SimpleNamespace(config=config, mesh=None)
    with pytest.raises(ConfigError, match="trees of drafts on several ranks"):
        DraftsPart(Forked(ForkedOptions())).runner(built)


class Comb(Forked):
    """Five wrong drafts and, beside the first one, a branch of up to four others, which are right
    behind two texts of three.
    """

    name: ClassVar[str] = "comb"

    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        self._branches = []
        drafts = []
        for history in step.histories:
            following = np.array(COMBED[len(history) : len(history) + 4], dtype=np.int64)
            drafts.append(np.full(5, 3 if 3 not in following[:1] else 4))
            right = len(history) % 3 < 2
            self._branches.append([(0, following if right else np.full_like(following, 5))])
        return drafts


@pytest.fixture(scope="module")
def comb() -> Iterator[Callable[..., list[Any]]]:
    """Lets engines whose steps verify trees of nine drafts answer one prompt, of 12 tokens, several
    times, each with a number of tokens, and gives the figures of all steps. In fp32, with blocks of
    32 tokens, of which no row may hold any behind its end once a step is over.
    """
    settings = {"dtype": "float32", "max_model_len": 64, "enable_prefix_caching": False}
    prompt = list(range(20, 32))
    with LLM("demo", **settings) as llm:
        params = GREEDY.with_(max_tokens=52)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    text = [*prompt, *output.outputs[0].token_ids]
    COMBED[:] = text
    table = {"method": "custom", "model": f"{__name__}:Comb", "num_speculative_tokens": 9}
    table |= {"adaptive": False, "trees": True}
    with ExitStack() as stack:

        @cache
        def opened(blocks: int) -> LLM:
            flags = {**settings, "num_gpu_blocks_override": blocks, "speculative_config": table}
            return stack.enter_context(LLM("demo", **flags))

        def answer(counts: Sequence[int], blocks: int = 8) -> list[Any]:
            llm = opened(blocks)
            scheduler, stats = llm._core.loop.scheduler, []
            commit = type(scheduler).commit

            def watched(plan, result):
                events = commit(scheduler, plan, result)
                stats.append(events.stats)
                ends = -(-scheduler.table.limit // 32) * 32
                assert (scheduler.cache.groups[0].room <= ends).all(), "slots are returned"
                return events

            scheduler.commit = watched
            params = [GREEDY.with_(max_tokens=count) for count in counts]
            prompts = [{"prompt_token_ids": prompt}] * len(counts)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            check_empty(llm._core.loop)
            for count, output in zip(counts, outputs, strict=True):
                assert list(output.outputs[0].token_ids) == text[12 : 12 + count]
            return stats

        yield answer


def test_trees_are_limited_by_depth(comb) -> None:
    """Nine drafts, of which four are right, although the answer ends behind fewer tokens."""
    assert [step.accepted for step in comb([10])] == [0, 4, 3]
    assert [step.drafted for step in comb([10])] == [0, 9, 6]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 19, 20, 21, 25, 43, *range(48, 53)])
def test_slots_behind_the_end_are_returned(comb, count: int) -> None:
    """At a block's end, and where the model's longest text ends: there are none behind it."""
    comb([count])


def test_nothing_is_preempted_for_slots_behind_the_end(comb) -> None:
    steps = comb([20, 20], blocks=3)
    assert not any(step.preempted for step in steps)
    assert max(step.running for step in steps) == 2
    comb([20, 9, 52, 19, 33], blocks=5)


def test_cut_trees_keep_what_is_not_too_deep(rng: random.Random, rounds: int) -> None:
    """Every draft that is left keeps its token and its parent's token."""
    for _ in range(50 * rounds):
        size, depth = rng.randrange(1, 30), rng.randrange(6)
        parents = [rng.randrange(node + 1) for node in range(size)]
        depths = [0]
        for parent in parents:
            depths.append(depths[parent] + 1)
        table = SimpleNamespace(rows=1)
        context = SimpleNamespace(
            values={"drafts": 30, "ahead": 0}, capacity=SimpleNamespace(vocabulary=100),
            rows=table, cache=None,
        )  # fmt: skip
        planner = DraftPlanner(context)
        planner.receive(None, SimpleNamespace(value={0: [range(50, 50 + size), parents]}))
        planner.settle(np.array([0]), np.array([1]), np.array([0]))
        planner._cut(0, depth)
        tokens = planner._tokens[0, : planner._counts[0]].tolist()
        names = [-1, *tokens]
        edges = [(token, names[p]) for token, p in zip(tokens, planner._parents[0], strict=True)]
        names = [-1, *range(50, 50 + size)]
        assert edges == [
            (50 + node, names[parent])
            for node, parent in enumerate(parents)
            if depths[node + 1] <= depth
        ]
