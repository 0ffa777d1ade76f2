"""OpenBMB MiniCPM 5 and MiniCPM-V: calls as elements; reasoning with line feeds written `\\n`.

Source: the chat templates of MiniCPM 5 and MiniCPM-V 4.5.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from attrs import evolve

from modulm.contracts.parser import Example, ParseContext
from modulm_parsing import (
    ArgumentsWriter,
    Ended,
    MessageReader,
    NotACall,
    Source,
    Steps,
    Thoughts,
    XmlCalls,
    markers,
)
from modulm_parsing.examples import TOOLS, thought, weather
from modulm_parsing.typed import STRING, parameters_of

__all__ = ["Minicpm5ToolParser", "MinicpmvReasoningParser"]

_OPEN_DATA, _CLOSE_DATA = "<![CDATA[", "]]>"
_UNKNOWN_TOOL = '<function name="f"><param name="a">1</param></function>'
_PARTIAL = '<function name="get_weather"><param name="days">3</param></function>'


class Minicpm5ToolParser(XmlCalls):
    """Text that looks like markup is in CDATA sections.

    Only calls of a known tool with all its required parameters count, so a call is emitted when it
    is complete.
    """

    name = "minicpm5"
    api = 1
    call = ('<function name="', '">', "</function>")
    parameter = ('<param name="', '">', "</param>")
    known_only = True
    examples = (
        weather(
            '<function name="get_weather"><param name="city">Oslo</param>'
            '<param name="days">3</param></function>'
        ),
        Example(
            '<function name="get_weather"><param name="city"><![CDATA[</param>]]></param>'
            "</function>",
            calls=(("get_weather", {"city": "</param>"}),),
            context=ParseContext(tools=TOOLS),
        ),
        evolve(weather(_UNKNOWN_TOOL, _UNKNOWN_TOOL), calls=()),
        evolve(weather(_PARTIAL, _PARTIAL), calls=()),
        Example(_UNKNOWN_TOOL, calls=(("f", {"a": 1}),)),
    )

    def one(self, message: MessageReader) -> Steps[bool]:
        source = message.source
        name = yield from self.called(source)
        schema = parameters_of(message.context.tools, name)
        parts: list[str] = []
        arguments = ArgumentsWriter(parts.append, schema)
        word: str | None = None
        while word != self.call[2]:
            if word is None:
                _, word = yield from source.through(markers(self.parameter[0], self.call[2]))
            if word == self.parameter[0]:
                word = yield from self.argument(source, arguments)
        arguments.end()
        required = schema.get("required") if schema is not None else None
        if isinstance(required, list) and not set(required) <= set(arguments.keys):
            raise NotACall
        message.start(name)
        message.arguments("".join(parts))
        message.end()
        return False

    def argument(self, source: Source, arguments: ArgumentsWriter) -> Steps[str | None]:
        key, _ = yield from source.through(markers(self.parameter[1]))
        data = yield from source.expect(markers(_OPEN_DATA))
        writer = arguments.value(key, framed=self.framed, allowed=STRING if data else None)
        if data:
            if (yield from source.until(markers(_CLOSE_DATA), writer.feed)) is None:
                raise Ended
            yield from source.through(markers(self.parameter[2]))
            word = None
        else:
            word = yield from self.text(source, writer.feed)
        writer.end()
        return word


_SPANS = {"```": "```", "`": "`", "$$": "$$", "$": "$", "\\(": "\\)", "\\[": "\\]"}
_FEEDS = ("\\r\\n", "\\n", "\\r")
_HEAD = re.compile(r"[`$\\]")
_MARK = re.compile(r"```|`|\$\$|\$|\\\\+|\\\(|\\\[|\\r\\n|\\n|\\r|\\")
#: A mark at the end of the text that more text could change.
_OPEN_ENDED = re.compile(r"(?:`{1,2}|\$|\\+|\\r\\?)\Z")


class LineFeeds:
    """Converts the two characters `\
    ` to a line feed, outside of code and formulas.
    """

    def __init__(self) -> None:
        self._pending = ""
        self._closing: str | None = None

    def feed(self, text: str) -> str:
        """Add text and return the part of the output that is final."""
        return self._change(self._pending + text, final=False)

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._change(self._pending, final=True)

    def _change(self, text: str, *, final: bool) -> str:
        self._pending = ""
        out: list[str] = []
        at = 0
        while at < len(text):
            if self._closing is not None:
                end = text.find(self._closing, at)
                if end < 0:
                    keep = 0 if final else _beginning(text, self._closing, at)
                    self._pending = text[len(text) - keep :]
                    out.append(text[at : len(text) - keep])
                    break
                end += len(self._closing)
                out.append(text[at:end])
                at, self._closing = end, None
                continue
            head = _HEAD.search(text, at)
            if head is None:
                out.append(text[at:])
                break
            out.append(text[at : head.start()])
            at = head.start()
            if not final and _OPEN_ENDED.match(text, at):
                self._pending = text[at:]
                break
            match = _MARK.match(text, at)
            mark = text[at] if match is None else match.group()
            out.append("\n" if mark in _FEEDS else mark)
            self._closing = _SPANS.get(mark)
            at += len(mark)
        return "".join(out)


def _beginning(text: str, word: str, start: int) -> int:
    """Return how many characters at the end of `text` may begin the word."""
    longest = min(len(word) - 1, len(text) - start)
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)


class MinicpmvReasoningParser(Thoughts):
    """As Qwen's, with line feeds that are written as two characters."""

    name = "minicpmv"
    api = 1
    switches = ("enable_thinking",)
    ends = ("<tool_call>",)
    edit: Callable[[], LineFeeds] = LineFeeds
    examples = (
        thought("Hm.</think>\n\nHi"),
        Example("Hi", "Hi", context=ParseContext(template_kwargs={"enable_thinking": False})),
        Example(
            r"a\nb</think>c\nd `e\n` $\nu$ ```\n``` \\n \(\neq\) \r\n.",
            "c\nd `e\\n` $\\nu$ ```\\n``` \\\\n \\(\\neq\\) \n.",
            "a\nb",
        ),
    )
