"""Kimi K2, K2 Thinking and K2.5: a section of tool calls, each after its id.

Source: the chat template of Kimi K2. An id is `functions.NAME:NUMBER`, where numbers count the
calls of the conversation, so ids must be passed on unchanged.
"""

from __future__ import annotations

import re

from modulm.contracts.parser import Example, ParseContext
from modulm_parsing import HeadedCalls, MessageReader, Steps, Thoughts, markers
from modulm_parsing.examples import thought, weather

__all__ = ["KimiK2ReasoningParser", "KimiK2ToolParser"]

_NUMBER = re.compile(r":\d+$")


class KimiK2ToolParser(HeadedCalls):
    """The tool's name is part of the call id."""

    name = "kimi_k2"
    api = 1
    group = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    open = "<|tool_call_begin|>"
    separators = ("<|tool_call_argument_begin|>",)
    close = "<|tool_call_end|>"
    examples = (
        weather(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
            '<|tool_call_argument_begin|>{"city": "Oslo", "days": 3}<|tool_call_end|>'
            "<|tool_calls_section_end|>"
        ),
        Example(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.a.b:1"
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_begin|>functions.c:2"
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            calls=(("a.b", {}), ("c", {})),
        ),
    )

    def header(self, message: MessageReader) -> Steps[tuple[str, str | None]]:
        written, _ = yield from message.source.through(markers(*self.separators))
        identity = written.strip()
        return _NUMBER.sub("", identity).removeprefix("functions."), identity


class KimiK2ReasoningParser(Thoughts):
    """On by default. A section of tool calls ends reasoning."""

    name = "kimi_k2"
    api = 1
    switches = ("thinking",)
    ends = (KimiK2ToolParser.group[0],)
    examples = (
        thought("Hm.</think>\n\nHi", thinking=True),
        Example("Hi", "Hi", context=ParseContext(template_kwargs={"thinking": False})),
    )
