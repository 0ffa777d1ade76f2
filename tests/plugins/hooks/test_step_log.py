"""A line in the log for each step."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from modulm import LLM, SamplingParams
from modulm.contracts.requests import StepStats
from modulm_hooks_step_log.hooks import line


def test_each_step_is_logged_with_the_flag(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="modulm.steps")
    flags: dict[str, Any] = {"max_model_len": 64}
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)
    for enabled, least in ((False, 0), (True, 3)):
        caplog.clear()
        with LLM("demo", enable_logging_iteration_details=enabled, **flags) as llm:
            llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)
        lines = [r.getMessage() for r in caplog.records if r.name == "modulm.steps"]
        assert len(lines) >= least
        assert bool(lines) == enabled
    computed, generated = zip(
        *(re.findall(r"(\d+) tokens computed, (\d+) generated", line)[0] for line in lines),
        strict=True,
    )
    assert sum(map(int, computed)) == 6
    assert sum(map(int, generated)) == 3


def test_drafts_and_preemptions_are_named() -> None:
    stats = StepStats(7, 2, 1, 0.5, computed=9, generated=3, preempted=1, drafted=4, accepted=2,
                      run_seconds=0.0125)  # fmt: skip
    assert line(stats) == (
        "step 7: 9 tokens computed, 3 generated, 2 requests running, 1 waiting, 2 of 4 drafts "
        "accepted, 1 preempted, 50% of the KV cache in use, 12.5 ms, planning 0.0 ms"
    )
