"""Which rank holds which experts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from modulm_distributed.placement import (
    balancedness,
    first_placement,
    placement,
    rank_loads,
)


@st.composite
def cases(draw):
    """Tokens of each expert, and who is where before."""
    ranks, own, spare = (draw(st.integers(*bounds)) for bounds in ((1, 6), (1, 6), (0, 4)))
    experts = ranks * own
    counts = draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    before = first_placement(experts, ranks, spare)
    for earlier in draw(st.lists(st.permutations(range(experts)), max_size=2)):
        before = placement(np.array(earlier), before)
    return np.array(counts), before


@given(cases())
def test_each_expert_is_somewhere_and_no_rank_has_more_to_do(case):
    counts, before = case
    after = placement(counts, before)
    assert after.shape == before.shape
    assert set(after.ravel()) == set(range(len(counts)))
    assert rank_loads(counts, after).max() <= rank_loads(counts, before).max()
    assert np.isclose(rank_loads(counts, after).sum(), counts.sum())
    assert np.array_equal(placement(counts, after), after)


@given(cases())
def test_who_stays_on_a_rank_stays_in_its_slot(case):
    counts, before = case
    for old, new in zip(before, placement(counts, before), strict=True):
        for expert in set(old) & set(new):
            at = np.nonzero(old == expert)[0]
            stays = np.nonzero(new == expert)[0]
            assert set(at) <= set(stays) or set(stays) <= set(at)


def test_a_heavy_expert_is_held_by_several_ranks():
    """Of 4 ranks with 3 slots: the one that half of the tokens choose is on all of them."""
    counts = np.array([700, 100, 100, 100, 100, 100, 100, 100])
    before = first_placement(8, 4, 1)
    after = placement(counts, before)
    assert all(0 in rank for rank in after)
    assert balancedness(counts, before) < 0.75
    assert balancedness(counts, after) > 0.93


def test_equal_experts_stay_where_they_are():
    before = first_placement(8, 4, 0)
    assert before.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert np.array_equal(placement(np.full(8, 5), before), before)
