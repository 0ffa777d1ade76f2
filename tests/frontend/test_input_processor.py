"""From prompts and parameters to requests: the seeds of their random streams."""

from __future__ import annotations

import pytest

from modulm.config import EngineConfig
from modulm.contracts.engine_info import EngineInfo
from modulm.contracts.sampling import SamplingParams
from modulm.plugins import manager
from modulm_frontend.input_processor import InputProcessor


def processor(seed: int) -> InputProcessor:
    info = EngineInfo(
        config=EngineConfig.from_keywords(seed=seed),
        models=("M",), path="", architecture="", max_model_len=32, vocabulary=100, hidden=8,
        dtype="float32", eos=(),
    )  # fmt: skip
    return InputProcessor(info, None, manager.current())


def seeds(of: InputProcessor, **params: object) -> list[int | None]:
    sampling = SamplingParams(temperature=1, max_tokens=2, **params)  # type: ignore[arg-type]
    return [request.seed for request in of.process([1, 2], sampling, "r").requests]


@pytest.mark.parametrize("seed", [0, 1, -1, -(2**63), 2**63 - 1])
def test_an_engine_with_any_seed_repeats_itself(seed: int) -> None:
    first, second = (seeds(processor(seed), n=3) for _ in range(2))
    assert first == second
    assert len(set(first)) == 3
    assert first != seeds(processor(seed + 1 if seed < 0 else seed - 1 if seed else 2), n=3)


def test_choices_of_a_seeded_request_have_seeds_in_a_row() -> None:
    assert seeds(processor(0), n=3, seed=-2) == [-2, -1, 0]
    assert seeds(processor(0), n=2, seed=2**63 - 1) == [2**63 - 1, 2**63]
