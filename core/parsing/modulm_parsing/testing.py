"""The contract kit for tool and reasoning parsers.

    from modulm_parsing.testing import check_parser

    def test_contract():
        check_parser(MyToolParser)

Every example of the parser must come out as it says, however its text is cut; and no beginning
of an example may be presented as more than it is.
"""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import TYPE_CHECKING

from modulm.contracts.parser import Event, Example, Parser, ToolEnd
from modulm_parsing import assemble, merge

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["check_example", "check_parser", "cuts", "events_of"]


def check_parser(parser: type[Parser]) -> None:
    """Run the whole kit. Raises AssertionError with the text and the cut that went wrong."""
    examples = parser.examples
    assert examples, f"{parser.__name__} states no examples"
    for example in examples:
        check_example(parser, example)


def check_example(parser: type[Parser], example: Example) -> None:
    """One example: its meaning, every cut of its text, every beginning of it."""
    whole = merge(events_of(parser, example, [example.text]))
    _check_meaning(example, whole)
    for pieces in cuts(example.text):
        assert merge(events_of(parser, example, pieces)) == whole, f"cut as {pieces!r}"
    ends = [event for event in whole if isinstance(event, ToolEnd)]
    for size in range(len(example.text)):
        events = events_of(parser, example, [example.text[:size]])
        complete = [event for event in events if isinstance(event, ToolEnd)]
        assert complete == ends[: len(complete)], f"after {size} characters"


def events_of(parser: type[Parser], example: Example, pieces: Iterable[str]) -> list[Event]:
    """The events of the pieces fed in order, and of the end."""
    made = parser(example.context)
    events = [event for piece in pieces for event in made.feed(piece)]
    return events + made.finish()


def cuts(text: str, seed: int = 0) -> Iterator[list[str]]:
    """Ways of cutting: every cut in two, character by character, and random ones."""
    yield list(text)
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
    choose = random.Random(seed)
    for _ in range(20):
        places = sorted(choose.sample(range(len(text) + 1), min(len(text), 6)))
        yield [text[a:b] for a, b in pairwise([0, *places, len(text)])]


def _check_meaning(example: Example, events: list[Event]) -> None:
    message = assemble(events)
    calls = tuple((c.name, json.loads(c.arguments)) for c in message.tool_calls if c.complete)
    assert message.content == example.content, f"content is {message.content!r}"
    assert message.reasoning == example.reasoning, f"reasoning is {message.reasoning!r}"
    assert calls == example.calls, f"calls are {calls!r}"
