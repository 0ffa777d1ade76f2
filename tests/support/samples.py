"""Cases of which `make test` runs a sample, and `make test-all` (`--everything`) every one."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from typing import Any

import pytest

#: Whether every case runs (`--everything`): for checks at the end of tests that `make test` has,
#: too. tests/conftest.py sets it.
everything = False


def sample(cases: Iterable[Any], every: int, *, tuples: bool = False) -> list[Any]:
    """Parameters of a fixture or a test: only the first of each `every` cases is in `make test`.

    Args:
        cases: values or `pytest.param`s, in an order that does not change.
        every: 3 runs the first, fourth, seventh ... case; the others are marked exhaustive.
        tuples: each case is a tuple of as many values as there are names.
    """
    parameters = []
    for number, case in enumerate(cases):
        if not isinstance(case, type(pytest.param())):
            case = pytest.param(*case) if tuples else pytest.param(case)
        marks = () if number % every == 0 else (pytest.mark.exhaustive,)
        parameters.append(pytest.param(*case.values, id=case.id, marks=(*case.marks, *marks)))
    return parameters


def parametrize_sample(
    names: str | tuple[str, ...], cases: Iterable[Any], every: int, **options: Any
) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` with a `sample` of the cases; `options` are its own."""
    tuples = not isinstance(names, str) or "," in names
    return pytest.mark.parametrize(names, sample(cases, every, tuples=tuples), **options)


def keep_covering(metafunc: pytest.Metafunc, size_of: Callable[[Mapping[str, Any]], int]) -> None:
    """Reduce the grid of a test's parameters to calls in which each combination of values occurs.

    Args:
        size_of: takes the parameters of a call; how many values are combined: 1 for each value, 2
            for each pair. Calls of different sizes are covered apart.
    """
    grids = defaultdict(list)
    for call in metafunc._calls:
        grids[size_of(call.params)].append(call)
    kept = {id(call) for size, calls in grids.items() for call in covering(calls, size)}
    metafunc._calls = [call for call in metafunc._calls if id(call) in kept]


def covering(calls: Iterable[Any], size: int) -> list[Any]:
    """Calls in which each combination of `size` values occurs that occurs in all of them."""
    chosen, covered = [], set()
    # In the order of the grid, those of the first value would be taken that are not needed.
    for call in sorted(calls, key=lambda call: zlib.crc32(call.id.encode())):
        values = sorted(call.indices.items())
        here = set(combinations(values, min(size, len(values))))
        if not here <= covered or not chosen:
            chosen.append(call)
            covered |= here
    return chosen
