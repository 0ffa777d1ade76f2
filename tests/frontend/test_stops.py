"""Stop strings: the result must not depend on how the text is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modulm_frontend.stops import StopScanner


def scan(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    scanner = StopScanner(stops, include)
    out = ""
    for piece in pieces:
        emitted, matched = scanner.feed(piece)
        out += emitted
        if matched is not None:
            return out, matched
    return out + scanner.finish(), None


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition, letter by letter."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


letters = st.text(alphabet="ab", max_size=24)


@given(
    text=letters,
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 24), max_size=8),
    include=st.booleans(),
)
def test_every_way_of_cutting_gives_the_same(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert scan(pieces, stops, include) == expected(text, stops, include)


def test_holds_back_only_what_could_begin_a_stop_string() -> None:
    scanner = StopScanner(["END"])
    assert scanner.feed("abcE") == ("abc", None)
    assert scanner.feed("N") == ("", None)
    assert scanner.feed("x") == ("ENx", None)
    assert scanner.feed("EN") == ("", None)
    assert scanner.finish() == "EN"


def test_longest_of_those_that_end_together() -> None:
    assert StopScanner(["b", "ab"]).feed("xab") == ("x", "ab")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopScanner(["a", ""])
