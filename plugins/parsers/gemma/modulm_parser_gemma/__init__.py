"""Google FunctionGemma and Gemma 4: `call:NAME{key:value}` with special tokens as delimiters.

Source: the chat templates of FunctionGemma 270M and of Gemma 4.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from modulm.contracts.parser import Example, ParseContext
from modulm_parser_gemma.spelled import call_in_tokens
from modulm_parsing import (
    ArgumentsWriter,
    Ended,
    MessageReader,
    NotACall,
    Source,
    Steps,
    Thoughts,
    ToolFormat,
    markers,
)
from modulm_parsing.elements import Element
from modulm_parsing.examples import thought, weather
from modulm_parsing.json_text import MAX_DEPTH, quoted
from modulm_parsing.strict import Function, Layout
from modulm_parsing.typed import EVERY, typed

__all__ = ["FunctionGemmaToolParser", "Gemma4ReasoningParser", "Gemma4ToolParser"]

_NAME = re.compile(r"[\w.\-/]*")
_BARE = re.compile(r"[^,{}\[\]<]*")


class Gemma4ToolParser(ToolFormat):
    """Strings are between quote tokens, numbers and literals are bare, objects and lists nest."""

    name = "gemma4"
    api = 1
    openers = ("<|tool_call>",)
    close = "<tool_call|>"
    quote = '<|"|>'
    examples = (
        weather('<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>'),
        Example(
            '<|tool_call>call:f{a:[<|"|>},{<|"|>,{b:true,c:-1.5}],d:{},e:null}<tool_call|>'
            "<|tool_call>call:g{}<tool_call|>",
            calls=(("f", {"a": ["},{", {"b": True, "c": -1.5}], "d": {}, "e": None}), ("g", {})),
        ),
    )

    @property
    def words(self) -> tuple[str, ...]:
        return (self.close, self.quote)

    def layout(self) -> Layout:
        return Layout(self.openers[0] + "call:", between="", end="")

    def strict_call(self, call: str, function: Function) -> Element:
        return call_in_tokens(call, function, self.quote, self.close)

    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        source = message.source
        yield from source.space()
        if not (yield from source.expect(markers("call:"))):
            raise NotACall
        yield from source.space()
        name = yield from source.run(_NAME)
        yield from source.space()
        if (yield from source.peek()) != "{":
            raise NotACall
        source.advance(source.at + 1)
        arguments = ArgumentsWriter(message.arguments, message.start(name))
        while (key := (yield from self.key(source))) is not None:
            yield from self.argument(source, arguments, key)
        arguments.end()
        message.end()
        yield from message.optional(self.close)

    def key(self, source: Source) -> Steps[str | None]:
        """Read the next key of an object and its colon; None after the closing brace."""
        yield from source.space()
        if (yield from source.peek()) == ",":
            source.advance(source.at + 1)
            yield from source.space()
        if (yield from source.peek()) == "}":
            source.advance(source.at + 1)
            return None
        if (yield from source.expect(markers(self.quote))):
            key, _ = yield from source.through(markers(self.quote))
            yield from source.through(markers(":"))
        else:
            key, _ = yield from source.through(markers(":"))
        yield from source.space()
        return key.strip()

    def argument(self, source: Source, arguments: ArgumentsWriter, key: str) -> Steps[None]:
        """Read a value of the call itself; a bare value is typed by the tool's schema."""
        if (yield from source.peek()) in "{[" or (yield from source.comes(markers(self.quote))):
            arguments.key(key)
            yield from self.value(source, arguments.emit)
        else:
            writer = arguments.value(key)
            writer.feed((yield from source.run(_BARE)).strip())
            writer.end()

    def value(self, source: Source, emit: Callable[[str], None], depth: int = 0) -> Steps[None]:
        """Read a value of any type."""
        if depth > MAX_DEPTH:
            raise NotACall
        if (yield from source.expect(markers(self.quote))):
            emit('"')
            closing = yield from source.until(markers(self.quote), lambda text: emit(quoted(text)))
            if closing is None:
                raise Ended
            emit('"')
            return
        head = yield from source.peek()
        if head == "{":
            source.advance(source.at + 1)
            comma = "{"
            while (key := (yield from self.key(source))) is not None:
                emit(f'{comma}"{quoted(key)}": ')
                comma = ", "
                yield from self.value(source, emit, depth + 1)
            emit("}" if comma == ", " else "{}")
        elif head == "[":
            yield from self.items(source, emit, depth)
        else:
            emit(typed((yield from source.run(_BARE)).strip(), EVERY))

    def items(self, source: Source, emit: Callable[[str], None], depth: int) -> Steps[None]:
        """A list."""
        source.advance(source.at + 1)
        emit("[")
        comma = ""
        while True:
            yield from source.space()
            head = yield from source.peek()
            if head == "]":
                source.advance(source.at + 1)
                emit("]")
                return
            if head == ",":
                source.advance(source.at + 1)
                continue
            emit(comma)
            comma = ", "
            yield from self.value(source, emit, depth + 1)
            yield from source.space()
            if (yield from source.peek()) not in ",]":
                raise NotACall


class FunctionGemmaToolParser(Gemma4ToolParser):
    """As Gemma 4, with other tokens."""

    name = "functiongemma"
    api = 1
    openers = ("<start_function_call>",)
    close = "<end_function_call>"
    quote = "<escape>"
    examples = (
        weather(
            "<start_function_call>call:get_weather{city:<escape>Oslo<escape>,days:3}"
            "<end_function_call>"
        ),
        Example(
            "<start_function_call>call:f{a:<escape><end_function_call><escape>}<end_function_call>",
            calls=(("f", {"a": "<end_function_call>"}),),
        ),
    )


class Gemma4ReasoningParser(Thoughts):
    """Reasoning is a channel named `thought`; a message without one is an answer."""

    name = "gemma4"
    api = 1
    opening = ("<|channel>",)
    closing = ("<channel|>",)
    prompt_opens = False
    switches = ("enable_thinking",)
    anywhere = True
    examples = (
        thought("<|channel>thought\nHm.\n<channel|>Hi", enable_thinking=True),
        Example("<|channel>thought\n<channel|>Hi", content="Hi"),
        Example(
            "Hi", content="Hi", context=ParseContext(template_kwargs={"enable_thinking": True})
        ),
    )

    def label(self, source: Source) -> Steps[None]:
        if not (yield from source.expect(markers("thought"))):
            raise NotACall
