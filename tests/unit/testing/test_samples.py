"""What `make test` leaves out of a grid, others of it show."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace

import pytest
from samples import covering, sample


def test_a_grid_keeps_each_combination() -> None:
    grid = [
        SimpleNamespace(id=f"{a}-{b}-{c}", indices={"a": a, "b": b, "c": c})
        for a, b, c in product(range(3), range(4), range(5))
    ]

    def covered(calls: list[SimpleNamespace], size: int) -> set[object]:
        return {pair for call in calls for pair in combinations(call.indices.items(), size)}

    for size, most in ((1, 15), (2, 40), (3, 60)):
        kept = covering(grid, size)
        assert covered(kept, size) == covered(grid, size)
        assert len(kept) <= most
        assert kept == covering(grid[::-1], size)
    assert len(covering([SimpleNamespace(id="", indices={})] * 2, 2)) == 1


def test_of_a_sample_the_others_are_exhaustive() -> None:
    named = pytest.param("c", id="third", marks=pytest.mark.slow)
    cases = sample(["a", "b", named, "d"], every=2)
    assert [[mark.name for mark in case.marks] for case in cases] == [
        [], ["exhaustive"], ["slow"], ["exhaustive"],
    ]  # fmt: skip
    assert cases[2].id == "third"
