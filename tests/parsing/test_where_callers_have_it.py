"""`modulm.parsing` is where callers find the functions that modulm-parsing holds."""

from __future__ import annotations

import pytest

import modulm_parsing
from modulm import parsing


def test_it_is_the_same() -> None:
    from modulm.parsing import parse

    assert parse is modulm_parsing.parse
    assert parsing.assemble is modulm_parsing.assemble


def test_what_is_not_there_is_no_attribute() -> None:
    with pytest.raises(AttributeError):
        parsing.nothing  # noqa: B018
