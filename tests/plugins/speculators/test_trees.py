"""Drafts in trees, on the attention backend that CPUs use by default."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from attrs import frozen

from modulm import LLM, SamplingParams
from modulm.config import EngineConfig
from modulm.contracts.drafter import DraftStep
from modulm.errors import ConfigError
from modulm_speculation import Options, Speculator
from modulm_speculation.speculator import Branch
from modulm_speculation.step.part import DraftsPart

PROMPTS = [[300, 301, 302] * 10, [17, 40], [90, 30, 31, 7] * 9]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
#: Whole texts from which trees are made.
KNOWN: list[list[int]] = []


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


def test_trees_need_one_rank() -> None:
    config = EngineConfig.from_keywords(model="demo", tensor_parallel_size=2)
    built = SimpleNamespace(config=config, mesh=None)
    with pytest.raises(ConfigError, match="trees of drafts on several ranks"):
        DraftsPart(Forked(ForkedOptions())).runner(built)
