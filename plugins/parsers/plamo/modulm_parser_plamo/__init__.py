"""Preferred Networks PLaMo 3: markers around requests, names, arguments and reasoning.

Source: the chat template of PLaMo 3.
"""

from __future__ import annotations

from modulm.contracts.parser import Example, ParseContext
from modulm_parsing import HeadedCalls, MessageReader, NotACall, Steps, Thoughts, markers
from modulm_parsing.examples import thought, weather

__all__ = ["Plamo3ReasoningParser", "Plamo3ToolParser"]


def _begin(word: str) -> str:
    return f"<|plamo:begin_{word}:plamo|>"


def _end(word: str) -> str:
    return f"<|plamo:end_{word}:plamo|>"


class Plamo3ToolParser(HeadedCalls):
    """A marker consists of several tokens."""

    name = "plamo3"
    api = 1
    group = (_begin("tool_requests"), _end("tool_requests"))
    open = _begin("tool_request")
    separators = (_end("tool_name"),)
    fences = ("<|plamo:constrain|>json<|plamo:msg|>", _end("tool_arguments"))
    close = _end("tool_request")
    examples = (
        weather(
            "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>"
            "<|plamo:begin_tool_name:plamo|>get_weather<|plamo:end_tool_name:plamo|>"
            "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
            '{"city": "Oslo", "days": 3}<|plamo:end_tool_arguments:plamo|>'
            "<|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|>"
        ),
    )

    def header(self, message: MessageReader) -> Steps[tuple[str, str | None]]:
        source = message.source
        yield from source.space()
        if not (yield from source.expect(markers(_begin("tool_name")))):
            raise NotACall
        name, _ = yield from source.through(markers(*self.separators))
        yield from source.space()
        if not (yield from source.expect(markers(_begin("tool_arguments")))):
            raise NotACall
        return name.strip(), None


class Plamo3ReasoningParser(Thoughts):
    """On by default."""

    name = "plamo3"
    api = 1
    opening = (_begin("think"),)
    closing = (_end("think"),)
    switches = ("enable_thinking",)
    ends = (_begin("tool_requests"),)
    examples = (
        thought("Hm.<|plamo:end_think:plamo|>Hi"),
        Example("Hi", "Hi", context=ParseContext(template_kwargs={"enable_thinking": False})),
    )
