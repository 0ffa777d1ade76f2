"""Kimi K3: XTML, elements written with special tokens: `<|open|>`, a name and attributes,
`<|sep|>`.

Source: the chat template of Kimi K3. A prompt may have opened the channel `think` or `response`.
"""

from __future__ import annotations

import re
from contextlib import suppress

from modulm.contracts.parser import Example, ParseContext
from modulm_parsing import (
    ArgumentsWriter,
    Ended,
    MessageReader,
    NotACall,
    ReasoningFormat,
    Steps,
    ToolFormat,
    markers,
)
from modulm_parsing.elements import Element, const, either, optional, sequence
from modulm_parsing.examples import thought, weather
from modulm_parsing.json_text import read_json
from modulm_parsing.strict import Function, Layout, properties_of, text_or_json
from modulm_parsing.thoughts import Pen
from modulm_parsing.typed import EVERY, STRING, kinds

__all__ = ["KimiK3ReasoningParser", "KimiK3ToolParser"]

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
_NAME = re.compile(r"\w*")
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_PROMPTED = re.compile(r"<\|open\|>(think|response|tools)<\|sep\|>\s*\Z")


class KimiK3Reader(MessageReader):
    """Reads one channel after another; text outside channels is content."""

    def body(self) -> Steps[None]:
        channel = yield from self._first()
        pen = Pen(self.reasoning)
        while True:
            self.thinking = self.thoughts is not None and channel == "think"
            emit = pen.write if channel == "think" else self.content
            word = yield from self.source.until(markers(OPEN, CLOSE), emit, quotes=True)
            if word is None:
                return
            channels: list[str] = []
            yield from self.attempt(self._tag(word, channel, channels), word, emit)
            channel = channels[0] if channels else channel
            pen = Pen(self.reasoning) if channels else pen

    def _first(self) -> Steps[str]:
        """Return the channel that the prompt opened."""
        tail = self.context.prompt_tail
        if tail is not None:
            match = _PROMPTED.search(tail)
            return match.group(1) if match else ""
        if self.thoughts is None or not self.thoughts.opened:
            return "response"
        with suppress(Ended):
            yield from self.source.space()
            return "" if (yield from self.source.comes(markers(OPEN))) else "think"
        return "think"

    def _tag(self, word: str, channel: str, channels: list[str]) -> Steps[None]:
        """Read the rest of a tag and append the channel after it to `channels`. Raises NotACall for
        unexpected tags.
        """
        source = self.source
        name = yield from source.run(_NAME)
        if name == "call" and word == OPEN and self.tools is not None and channel in ("", "tools"):
            yield from self.tools.read(self, word)
            return
        opens = ("message", "think", "response", *(("tools",) if self.tools is not None else ()))
        if name not in opens or (word == CLOSE and name not in (channel, "message")):
            raise NotACall
        if name == "message":
            yield from source.through(markers(SEP))
        elif not (yield from source.expect(markers(SEP))):
            raise NotACall
        source.unconfirmed = None
        self.layout()
        channels.append(name if word == OPEN and name != "message" else "")


class KimiK3ToolParser(ToolFormat):
    """Values with `type="string"` are raw text, others are JSON."""

    name = "kimi_k3"
    api = 1
    reader = KimiK3Reader
    words = (OPEN, CLOSE, SEP)
    examples = (
        weather(
            '<|open|>tools<|sep|><|open|>call tool="get_weather" index="0"<|sep|>'
            '<|open|>argument key="city" type="string"<|sep|>Oslo<|close|>argument<|sep|>'
            '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
            "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
        ),
        Example(
            "<|open|>response<|sep|>Both:<|close|>response<|sep|><|open|>tools<|sep|>"
            '<|open|>call tool="a&amp;b" index="0"<|sep|><|close|>call<|sep|>'
            '<|open|>call tool="c" index="1"<|sep|><|open|>json<|sep|>{"x": [1]}'
            "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
            "Both:",
            calls=(("a&b", {}), ("c", {"x": [1]})),
        ),
    )

    def layout(self) -> Layout:
        tools = f"{SEP}{OPEN}tools{SEP}"
        end = f"{CLOSE}tools{SEP}{CLOSE}message{SEP}"
        return Layout(f"{OPEN}call tool=", tools.removeprefix(SEP), "", end)

    def strict_openers(self) -> tuple[str, ...]:
        return (f"{OPEN}tools{SEP}", f"{OPEN}call")

    def strict_call(self, call: str, function: Function) -> Element:
        arguments = []
        for key, schema, needed in properties_of(function):
            part = text_or_json(schema, function, key, (f"{CLOSE}argument{SEP}",))
            ways = [] if part.text is None else [_argument(key, "string", part.text)]
            if part.json is not None:
                types = sorted(kinds(schema, function.parameters) - {"string"}) or ["object"]
                kind = "number" if types[0] == "integer" else types[0]
                ways.append(_argument(key, kind, part.json))
            arguments.append(either(*ways) if needed else optional(either(*ways)))
        head = const(f'{call}"{function.name}" index="0"{SEP}')
        return sequence(head, *arguments, const(f"{CLOSE}call{SEP}"))

    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        """Read a call after its tag name."""
        source = message.source
        attributes = yield from self._attributes(message)
        if "tool" not in attributes:
            raise NotACall
        arguments = ArgumentsWriter(message.arguments, message.start(attributes["tool"]))
        while True:
            _, word = yield from source.through(markers(OPEN, CLOSE))
            name = yield from source.run(_NAME)
            attributes = yield from self._attributes(message)
            if word == CLOSE and name == "call":
                break
            if word == OPEN and name == "json" and not arguments.keys:
                yield from source.space()
                yield from read_json(source, message.raw_arguments)
                message.end_raw()
                yield from source.through(markers(f"{CLOSE}call{SEP}"))
                return
            if word == OPEN and name == "argument":
                allowed = STRING if attributes.get("type") == "string" else EVERY
                writer = arguments.value(attributes.get("key", ""), allowed=allowed)
                closing = markers(f"{CLOSE}argument{SEP}")
                if (yield from source.until(closing, writer.feed)) is None:
                    raise Ended
                writer.end()
        arguments.end()
        message.end()

    def _attributes(self, message: MessageReader) -> Steps[dict[str, str]]:
        """Read the rest of a tag."""
        written, _ = yield from message.source.through(markers(SEP))
        return {
            key: value.replace("&quot;", '"').replace("&amp;", "&")
            for key, value in _ATTRIBUTE.findall(written)
        }


def _argument(key: str, kind: str, value: Element) -> Element:
    head = f'{OPEN}argument key="{key}" type="{kind}"{SEP}'
    return sequence(const(head), value, const(f"{CLOSE}argument{SEP}"))


class KimiK3ReasoningParser(ReasoningFormat):
    """The channel `think`. The markers of the channel `response` are not content."""

    name = "kimi_k3"
    api = 1
    tells_end = True
    reader = KimiK3Reader
    words = (OPEN, CLOSE, SEP)
    examples = (
        thought(
            "Hm.<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|>"
            "<|close|>message<|sep|>"
        ),
        thought(
            "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>Hi"
            "<|close|>response<|sep|>"
        ),
        Example(
            "Hi<|close|>response<|sep|><|close|>message<|sep|>",
            "Hi",
            context=ParseContext(template_kwargs={"thinking": False}),
        ),
        Example(
            "Hi<|close|>response<|sep|>",
            "Hi",
            context=ParseContext(prompt_tail="<|open|>response<|sep|>"),
        ),
    )

    @property
    def opened(self) -> bool:
        tail = self.context.prompt_tail
        if tail is not None:
            match = _PROMPTED.search(tail)
            return match is not None and match.group(1) == "think"
        return self.context.template_kwargs.get("thinking") is not False

    def ending(self, message: MessageReader) -> str | None:
        """Return the end of the channel; the model chooses the next one."""
        return f"{CLOSE}think{SEP}"

    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        """Do nothing: only channels open reasoning."""
        yield from ()
