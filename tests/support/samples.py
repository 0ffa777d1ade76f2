"""Cases of which `make test` runs a sample, and `make test-all` (`--everything`) every one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


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
