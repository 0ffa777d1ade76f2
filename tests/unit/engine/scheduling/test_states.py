"""Scheduling beside states of recurrent layers: prompts are cut where a state can be kept."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from modulm.contracts.executor import Capacity, GroupCapacity, StepResult
from modulm.contracts.requests import Request
from modulm.contracts.sampling import SamplingParams
from modulm.contracts.state import SEGMENT
from modulm.engine.scheduling.limits import Limits
from modulm.engine.scheduling.scheduler import BudgetScheduler
from modulm.testing.engines import ByArrival

STATES = ("state", SEGMENT, None, 33)
GROUPS = st.sampled_from([(STATES,), (("attention", 16, None, 65), STATES)])
LENGTHS = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), min_size=1, max_size=4)


def scheduler(groups=(STATES,), rows: int = 8, **limits: int) -> BudgetScheduler:
    return BudgetScheduler(
        Limits(rows=rows, **limits),
        Capacity(tuple(GroupCapacity(*group) for group in groups), 500, 256),
        ByArrival(),
    )


def run(scheduler, prompts, tokens: int = 3):
    """Cached tokens of each prompt, and (first, last) of the steps that computed it."""
    asks = SamplingParams(temperature=0, max_tokens=tokens)
    for number, prompt in enumerate(prompts):
        scheduler.add(Request(id=str(number), prompt=prompt, params=asks, eos=()))
    cached, steps, rows = {}, {}, {}
    while scheduler.busy:
        plan = scheduler.plan()
        assert len(plan.rows), "the scheduler makes no progress"
        rows |= {start.row: int(start.request) for start in plan.admit}
        for row, first, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            steps.setdefault(rows[int(row)], []).append((int(first), int(first + count)))
        sampled = np.full(int(plan.samples.sum()), 7)
        events = scheduler.commit(plan, StepResult(step=plan.step, tokens=sampled))
        cached |= {int(start.request): start.cached for start in events.started}
    return [cached[i] for i in range(len(prompts))], [steps[i] for i in range(len(prompts))]


def texts(lengths, seed: int) -> list[list[int]]:
    """Prompts that share `begin` tokens of one text and have `own` more."""
    rng = random.Random(seed)
    text = [rng.randrange(1, 500) for _ in range(400)]
    return [[*text[:begin], *(rng.randrange(1, 500) for _ in range(own))] for begin, own in lengths]


@settings(max_examples=50, deadline=None)
@given(GROUPS, LENGTHS, st.integers(0, 3))
@example((STATES,), [(9, 39), (132, 18), (43, 29), (160, 30)], 0)
@example((STATES,), [(153, 16), (105, 31), (182, 18), (163, 35)], 0)
def test_what_ran_once_is_found_as_far_as_whole_segments_go(groups, lengths, seed):
    prompts = texts(lengths, seed)
    engine = scheduler(groups, tokens=256)
    run(engine, prompts)
    cached, _ = run(engine, prompts)
    assert cached == [(len(prompt) - 1) // SEGMENT * SEGMENT for prompt in prompts]


def test_a_prompt_waits_rather_than_end_within_a_segment():
    prompts = texts([(0, 200), (0, 100)], 0)
    _, (first, second) = run(scheduler(tokens=250), prompts, tokens=1)
    assert first == [(0, 200)]
    assert second == [(0, 100)], "50 tokens were left beside the first prompt"


@pytest.mark.parametrize(
    ("prompts", "limits", "expected"),
    [
        pytest.param([(0, 200)], {"tokens": 40}, (0, 40), id="steps smaller than a segment"),
        pytest.param([(0, 200)], {"tokens": 256, "long": 40}, (0, 40), id="chunks smaller"),
        pytest.param([*[(0, 1)] * 8, (0, 100)], {"tokens": 70, "rows": 9}, (0, 62), id="decoding"),
    ],
)
def test_where_no_segment_fits_a_prompt_goes_on_all_the_same(prompts, limits, expected):
    _, steps = run(scheduler(**limits), texts(prompts, 0), tokens=9)
    assert steps[-1][0] == expected


@settings(max_examples=30, deadline=None)
@given(
    LENGTHS,
    st.integers(5, 300),
    st.sampled_from([0, 0, 30, 70]),
    st.integers(1, 8),
    st.integers(1, 9),
)
def test_every_prompt_is_computed_whole_under_any_limits(lengths, tokens, long, rows, answer):
    prompts = texts(lengths, 0)
    engine = scheduler(rows=rows, tokens=tokens, long=long)
    cached, steps = run(engine, prompts, answer)
    for prompt, hit, parts in zip(prompts, cached, steps, strict=True):
        assert [first for first, _ in parts] == [hit, *(last for _, last in parts[:-1])]
        assert parts[-1][1] == len(prompt) + answer - 1
    assert engine.cache.groups[0].pool.used == 0
