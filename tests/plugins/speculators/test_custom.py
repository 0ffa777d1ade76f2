"""A class of the user's own as speculator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
from attrs import frozen
from samples import parametrize_sample

from modulm import LLM, SamplingParams
from modulm.contracts.drafter import DraftStep
from modulm.errors import ConfigError
from modulm_speculation import Options, Speculator, Target

#: Past its end of text the embedded model asks itself the same question again and again.
GREEDY = SamplingParams(temperature=0, max_tokens=160, ignore_eos=True)
PROMPT = {"prompt_token_ids": [300, 301, 302] * 10}


@frozen
class PeriodOptions(Options):
    """period: tokens after which the text is said to repeat itself."""

    period: int = 1


class Period(Speculator):
    """What stood `period` tokens before."""

    name: ClassVar[str] = "period"
    Config: ClassVar[type] = PeriodOptions
    opened: ClassVar[list[str]] = []

    @classmethod
    def open(cls, config: Options, target: Target) -> Period:
        cls.opened.append(type(target.model).__name__)
        return cls(config)

    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        period = self.config.period
        return [
            np.resize(history[-period:], most)
            for history, most in zip(step.histories, step.most, strict=True)
        ]


def run(**flags):
    with LLM("demo", max_model_len=256, num_gpu_blocks_override=60, **flags) as llm:
        steps = llm._core.loop.scheduler.gauges
        outputs = llm.generate([PROMPT], GREEDY, use_tqdm=False)
        return outputs[0].outputs[0].token_ids, steps().step


def repeats_after(tokens: Sequence[int]) -> int:
    """The least number of tokens after which the end of a text repeats itself."""
    return next(n for n in range(1, len(tokens) // 2) if tokens[-n:] == tokens[-2 * n : -n])


@pytest.fixture(scope="module")
def plain():
    return run()


@parametrize_sample(
    ("method", "dot"),
    [("custom", ":"), ("custom", "."), ("custom_class", "."), ("custom_class", ":")],
    every=2,
)
def test_a_class_by_its_path(method, dot, plain) -> None:
    table = {
        "method": method,
        "model": f"{__name__}{dot}Period",
        "period": repeats_after(plain[0]),
        "adaptive": False,
        "num_speculative_tokens": 4,
    }
    drafted = run(speculative_config=table)
    assert plain[0] == drafted[0]
    assert drafted[1] < plain[1]
    assert Period.opened


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "model: the path of a speculator's class is required"),
        ({"model": "nodots"}, "model: the path of a speculator's class is required"),
        ({"model": "no_such_module:Class"}, "no_such_module"),
        ({"model": f"{__name__}:PeriodOptions"}, "PeriodOptions"),
        ({"model": f"{__name__}:Period", "perod": 3}, "perod"),
    ],
)
def test_a_class_that_cannot_be(table, message) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("demo", speculative_config={"method": "custom", **table})
