"""MiniMax M2, M2.1 and M3: tool calls as elements; reasoning.

Source: the chat templates of MiniMax M2 and M3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from modulm.contracts.parser import Example, ParseContext
from modulm_parsing import (
    Ended,
    MessageReader,
    NotACall,
    Source,
    Steps,
    Thoughts,
    ToolFormat,
    XmlCalls,
    markers,
)
from modulm_parsing.elements import Element, const, either, optional, repeat, sequence
from modulm_parsing.examples import TOOLS, thought, weather
from modulm_parsing.json_text import MAX_DEPTH, quoted
from modulm_parsing.strict import (
    Function,
    Layout,
    properties_of,
    resolved,
    text_or_json,
    with_roots,
)
from modulm_parsing.typed import EVERY, ValueWriter, kinds

__all__ = [
    "MinimaxM2AppendThinkReasoningParser",
    "MinimaxM2ReasoningParser",
    "MinimaxM2ToolParser",
    "MinimaxM3ReasoningParser",
    "MinimaxM3ToolParser",
]

#: Most items of a list whose schema sets no limit.
_MANY = 64
_SIGN = "]<]minimax[>["
_TAG = re.compile(r"[^<>]*")


class MinimaxM2ToolParser(XmlCalls):
    """Types come from the tool's schema."""

    name = "minimax_m2"
    api = 1
    outer = ("<minimax:tool_call>", "</minimax:tool_call>")
    strict_outer = True
    call = ('<invoke name="', '">', "</invoke>")
    parameter = ('<parameter name="', '">', "</parameter>")
    examples = (
        weather(
            '<minimax:tool_call>\n<invoke name="get_weather">\n'
            '<parameter name="city">Oslo</parameter>\n<parameter name="days">3</parameter>\n'
            "</invoke>\n</minimax:tool_call>"
        ),
    )


class MinimaxM3ToolParser(ToolFormat):
    """A marker precedes every tag. Arguments are elements that may nest, with `<item>` in lists."""

    name = "minimax_m3"
    api = 1
    openers = (f"{_SIGN}<tool_call>",)
    words = (_SIGN,)
    examples = (
        weather(
            f'{_SIGN}<tool_call>\n{_SIGN}<invoke name="get_weather">\n'
            f"{_SIGN}<city>Oslo{_SIGN}</city>\n{_SIGN}<days>3{_SIGN}</days>\n"
            f"{_SIGN}</invoke>\n{_SIGN}</tool_call>"
        ),
        Example(
            f'{_SIGN}<tool_call>{_SIGN}<invoke name="get_weather">{_SIGN}<city></b>{_SIGN}</city>'
            f"{_SIGN}<options>{_SIGN}<units>5{_SIGN}</units>{_SIGN}<hours>{_SIGN}<item>1"
            f"{_SIGN}</item>{_SIGN}<item>2{_SIGN}</item>{_SIGN}</hours>{_SIGN}</options>"
            f'{_SIGN}</invoke>{_SIGN}<invoke name="now">{_SIGN}</invoke>{_SIGN}</tool_call>',
            calls=(
                ("get_weather", {"city": "</b>", "options": {"units": "5", "hours": [1, 2]}}),
                ("now", {}),
            ),
            context=ParseContext(tools=TOOLS),
        ),
    )

    def layout(self) -> Layout:
        return Layout("", f"{self.openers[0]}\n", "\n", f"\n{_SIGN}</tool_call>")

    def strict_call(self, call: str, function: Function) -> Element:
        head = const(f'{_SIGN}<invoke name="{function.name}">\n')
        return sequence(head, _elements(function, "\n"), const(f"{_SIGN}</invoke>"))

    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        source = message.source
        while True:
            _, _ = yield from source.through(markers(_SIGN))
            tag = yield from self._tag(source)
            if tag == "/tool_call" and message.calls:
                source.unconfirmed = None
                return
            if not tag.startswith('invoke name="'):
                raise NotACall
            yield from self._call(message, tag.removeprefix('invoke name="').rstrip('" '))

    def _call(self, message: MessageReader, name: str) -> Steps[None]:
        source = message.source
        schema = message.start(name)
        comma = "{"
        while True:
            yield from source.through(markers(_SIGN))
            tag = yield from self._tag(source)
            if tag == "/invoke":
                break
            message.arguments(f'{comma}"{quoted(tag)}": ')
            comma = ", "
            yield from self._value(message, _member(schema, tag), schema)
        message.arguments("{}" if comma == "{" else "}")
        message.end()

    def _tag(self, source: Source) -> Steps[str]:
        """Read a tag after the marker."""
        if (yield from source.peek()) != "<":
            raise NotACall
        source.advance(source.at + 1)
        tag = yield from source.run(_TAG)
        if (yield from source.peek()) != ">":
            raise NotACall
        source.advance(source.at + 1)
        return tag.strip()

    def _value(
        self, message: MessageReader, schema: object, root: object, depth: int = 0
    ) -> Steps[None]:
        """Read a value after its opening tag, including the closing tag."""
        if depth > MAX_DEPTH:
            raise NotACall
        source = message.source
        allowed = kinds(schema, root if isinstance(root, Mapping) else None)
        text = ValueWriter(message.arguments, allowed)
        space = yield from source.space()
        sign = markers(_SIGN)
        if not (yield from source.comes(sign)):
            text.feed(space)
            if (yield from source.until(sign, text.feed)) is None:
                raise Ended
            text.end()
            yield from self._tag(source)
            return
        yield from source.expect(sign)
        tag = yield from self._tag(source)
        if tag.startswith("/"):
            _empty(text, space, allowed, message)
            return
        listed = tag == "item" and (allowed == EVERY or "array" in allowed)
        mark = "[" if listed else "{"
        while not tag.startswith("/"):
            message.arguments(mark if listed else f'{mark}"{quoted(tag)}": ')
            mark = ", "
            inner = _items(schema) if listed else _member(schema, tag)
            yield from self._value(message, inner, root, depth + 1)
            yield from source.through(sign)
            tag = yield from self._tag(source)
        message.arguments("]" if listed else "}")


def _empty(text: ValueWriter, space: str, allowed: frozenset[str], message: MessageReader) -> None:
    """Write an empty value."""
    if "string" not in allowed and "array" in allowed:
        message.arguments("[]")
    elif "string" not in allowed and "object" in allowed:
        message.arguments("{}")
    else:
        text.feed(space)
        text.end()


def _member(schema: object, name: str) -> object:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(name) if isinstance(properties, Mapping) else None


def _items(schema: object) -> object:
    return schema.get("items") if isinstance(schema, Mapping) else None


def _elements(function: Function, behind: str = "") -> Element:
    """Return the properties of an object as elements."""
    properties = []
    for key, schema, needed in properties_of(function):
        end = const(f"{_SIGN}</{key}>{behind}")
        element = sequence(const(f"{_SIGN}<{key}>"), _nested(schema, function, key), end)
        properties.append(element if needed else optional(element))
    return sequence(*properties)


def _nested(schema: object, function: Function, key: str) -> Element:
    """Return a value, with nested elements if the schema describes an object's properties or a
    list's items.
    """
    plain = resolved(schema, function)
    types = kinds(plain, function.parameters)
    if types == {"object"} and plain.get("properties"):
        inner = {**with_roots(plain, function), "$defs": function.parameters.get("$defs", {})}
        return _elements(Function(function.name, inner))
    low, high = plain.get("minItems", 0), plain.get("maxItems")
    if types == {"array"} and plain.get("items") and isinstance(low, int):
        item = _nested(plain["items"], function, key)
        most = high if isinstance(high, int) else max(low, _MANY)
        return repeat(sequence(const(f"{_SIGN}<item>"), item, const(f"{_SIGN}</item>")), low, most)
    part = text_or_json(schema, function, key, (_SIGN,))
    return either(*(way for way in (part.text, part.json) if way is not None))


class MinimaxM2ReasoningParser(Thoughts):
    """The prompt opens reasoning."""

    name = "minimax_m2"
    api = 1
    ends = ("<minimax:tool_call>",)
    examples = (thought("Hm.\n</think>\n\nHi"),)


class MinimaxM2AppendThinkReasoningParser(MinimaxM2ReasoningParser):
    """Nothing is split: the opening tag is prepended, and all text is content."""

    name = "minimax_m2_append_think"
    api = 1
    tells_end = False
    openers = ()
    examples = (
        Example("Hm.</think>\n\nHi", "<think>Hm.</think>\n\nHi"),
        Example("<think>Hm.</think>\n\nHi", "<think>Hm.</think>\n\nHi"),
    )

    def begin(self, message: MessageReader) -> Steps[None]:
        message.thinking = False
        if not (yield from message.source.over()):
            written = yield from message.source.comes(markers(*self.opening))
            message.content("" if written or not self.opened else self.opening[0])


class MinimaxM3ReasoningParser(Thoughts):
    """The model writes the tags, unless `thinking_mode` makes the prompt open reasoning."""

    name = "minimax_m3"
    api = 1
    template_switches: ClassVar[Mapping[str, tuple[object, object]]] = {
        "thinking_mode": ("disabled", "enabled")
    }
    opening = ("<mm:think>",)
    closing = ("</mm:think>",)
    prompt_opens = False
    ends = MinimaxM3ToolParser.openers
    examples = (
        thought("<mm:think>Hm.</mm:think>Hi"),
        thought("Hm.</mm:think>Hi", thinking_mode="enabled"),
        Example("Hi", "Hi"),
    )

    @property
    def opened(self) -> bool:
        enabled = self.context.template_kwargs.get("thinking_mode") == "enabled"
        return super().opened or (self.context.prompt_tail is None and enabled)
