"""The contract kit for tool and reasoning parsers.

    from modulm_parsing.testing import check_parser

    def test_contract():
        check_parser(MyToolParser)

Every example of the parser must give its declared events, however its text is divided, and no
prefix of it may be parsed as more than it is. A tool parser with an example that calls
`get_weather(city="Oslo", days=3)` (see `modulm_parsing.examples`) is also tried with other values,
several calls and text around them; quoted markers must stay text; and the work must be linear in
the length of the text.
"""

from __future__ import annotations

import json
import random
import sys
from itertools import pairwise
from typing import TYPE_CHECKING

from attrs import evolve

from modulm.contracts.parser import Content, Event, Example, Parser, Reasoning, ToolEnd, ToolParser
from modulm_parsing.examples import TOOLS, WEATHER
from modulm_parsing.message import assemble, merge
from modulm_parsing.reading import Format, ToolFormat

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "check_example",
    "check_linear",
    "check_parser",
    "check_values",
    "cuts",
    "events_of",
    "steps_per_character",
]

#: String values that are hard to write or look like something else.
_VALUES = (
    "",
    " ",
    "}{][",
    "\"quoted\" and 'single'",
    "a\nb\tc",
    "back\\slash \\n",
    "Ærø, 東京, 👨‍👩‍👧",
    "12",
    "true",
    "null",
    "<b>&amp;</b>",
    "</tool_call>",
    "<think>",
    "a < b > c",
    "x" * 300,
)
_SMALL, _LARGE, _PIECE = 10_000, 1_000_000, 256


def check_parser(parser: type[Parser]) -> None:
    """Run the whole kit. Raises AssertionError with the text and the pieces that failed."""
    examples = parser.examples
    assert examples, f"{parser.__name__} has no examples"
    for example in examples:
        check_example(parser, example)
    _check_quotes(parser)
    check_values(parser)
    check_linear(parser)


def check_example(parser: type[Parser], example: Example) -> None:
    """Check one example: its events, every way to divide its text in two, and every prefix."""
    whole = merge(events_of(parser, example, [example.text]))
    _check_meaning(example, whole)
    for pieces in cuts(example.text):
        assert merge(events_of(parser, example, pieces)) == whole, f"cut as {pieces!r}"
    ends = [event for event in whole if isinstance(event, ToolEnd)]
    for size in range(len(example.text)):
        events = events_of(parser, example, [example.text[:size]])
        complete = [event for event in events if isinstance(event, ToolEnd)]
        assert complete == ends[: len(complete)], f"after {size} characters"


def _check_quotes(parser: type[Parser]) -> None:
    """Check that quoted markers are text."""
    example = parser.examples[0]
    instance = parser(example.context)
    markers = instance.openers if isinstance(instance, Format) else parser.special_tokens
    for marker in markers:
        for quote in "`\"'":
            text = f"Write {quote}{marker}{quote} here."
            for pieces in ([text], list(text)):
                text_out = "".join(map(_text_of, events_of(parser, example, pieces)))
                assert text_out == text, f"{text!r} came out as {text_out!r}"


def _text_of(event: Event) -> str:
    return event.text if isinstance(event, Content | Reasoning) else ""


def check_values(parser: type[Parser]) -> None:
    """Check other values of the examples' call, several calls, and text around them."""
    example = next((each for each in parser.examples if _is_plain_call(each)), None)
    if example is None or not issubclass(parser, ToolParser):
        return
    context = evolve(example.context, tools=TOOLS)
    for value in _VALUES:
        text = _written(example.text, value)
        if text is not None:
            calls = (("get_weather", {"city": value, "days": 3}),)
            _check_cuts(parser, Example(text, calls=calls, context=context))
    if "[" not in example.text[:1] and "{" not in example.text[:1]:
        layout = "" if issubclass(parser, ToolFormat) and parser.keeps_space else "\n"
        several = example.text + layout + example.text
        _check_cuts(parser, Example(several, calls=WEATHER * 2, context=context))
        many = Example(example.text * 1000, calls=WEATHER * 1000, context=context)
        _check_meaning(many, merge(events_of(parser, many, [many.text])))


def _check_cuts(parser: type[Parser], example: Example) -> None:
    """Check the events of an example, and some ways to divide its text."""
    whole = merge(events_of(parser, example, [example.text]))
    _check_meaning(example, whole)
    choose = random.Random(len(example.text))
    cut_points = sorted(choose.sample(range(len(example.text) + 1), min(len(example.text), 9)))
    some = [example.text[a:b] for a, b in pairwise([0, *cut_points, len(example.text)])]
    for pieces in (list(example.text), some):
        assert merge(events_of(parser, example, pieces)) == whole, f"cut as {pieces!r}"


def _is_plain_call(example: Example) -> bool:
    return example.calls == WEATHER and example.text.count("Oslo") == 1 and not example.content


def _written(text: str, value: str) -> str | None:
    """Return the text of a call with another value for Oslo, as its format writes strings.

    None if the format cannot express the value.
    """
    if '"Oslo"' in text:
        return text.replace('"Oslo"', json.dumps(value, ensure_ascii=False))
    if "'Oslo'" in text:
        return text.replace("'Oslo'", repr(value))
    framed = "\nOslo\n" in text
    if not framed and value != value.strip("\n"):
        return None
    return text.replace("Oslo", value)


def check_linear(parser: type[Parser]) -> None:
    """Check that work per character of 1 MB is at most twice that of 10 kB."""
    example = parser.examples[0]
    texts = [("Some prose, with a < b and {c}. ", "")]
    plain = next((each for each in parser.examples if _is_plain_call(each)), None)
    if plain is not None:
        example = plain
        before, _, after = plain.text.partition("Oslo")
        texts.append((before, after))
    for number, (before, after) in enumerate(texts):
        work = []
        for size in (_SMALL, _LARGE):
            text = before * (size // len(before)) if number == 0 else before + "x" * size + after
            work.append(steps_per_character(parser, example, text))
        assert work[1] <= 2 * work[0] + 0.1, f"{work} steps for a character of {before!r}"


def steps_per_character(parser: type[Parser], example: Example, text: str) -> float:
    """Steps per character of a text that arrives in pieces.

    For a format, characters examined; for other parsers, function calls.
    """
    instance = parser(example.context)
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    if isinstance(instance, Format):
        for piece in pieces:
            instance.feed(piece)
        instance.finish()
        return instance.steps / len(text)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for piece in pieces:
            instance.feed(piece)
        instance.finish()
    finally:
        sys.setprofile(before)
    return calls / len(text)


def events_of(parser: type[Parser], example: Example, pieces: Iterable[str]) -> list[Event]:
    """Return the events of the pieces fed in order, and of the end."""
    instance = parser(example.context)
    events = [event for piece in pieces for event in instance.feed(piece)]
    return events + instance.finish()


def cuts(text: str, seed: int = 0) -> Iterator[list[str]]:
    """Yield divisions of a text: in two at every index, by characters, and at random."""
    yield list(text)
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
    choose = random.Random(seed)
    for _ in range(20):
        cut_points = sorted(choose.sample(range(len(text) + 1), min(len(text), 6)))
        yield [text[a:b] for a, b in pairwise([0, *cut_points, len(text)])]


def _check_meaning(example: Example, events: list[Event]) -> None:
    message = assemble(events)
    calls = tuple((c.name, json.loads(c.arguments)) for c in message.tool_calls if c.complete)
    source_text = f"of {example.text[:300]!r}"
    assert message.content == example.content, f"content {source_text} is {message.content!r}"
    assert message.reasoning == example.reasoning, (
        f"reasoning {source_text} is {message.reasoning!r}"
    )
    assert calls == example.calls, f"calls {source_text} are {calls[:3]!r}"
