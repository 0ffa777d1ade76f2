"""IBM Granite 3.0 to 4.2: tool calls as JSON after a marker, reasoning between sentences or tags.

Source: the chat templates of Granite 3.0, 3.1, 3.2, 4.0 and 4.2 and of granite-20b-functioncalling.
"""

from __future__ import annotations

from modulm.contracts.parser import Example, ParseContext
from modulm_parsing import JsonCalls, Thoughts
from modulm_parsing.examples import thought, weather

__all__ = [
    "Granite4ToolParser",
    "Granite20bToolParser",
    "GraniteReasoningParser",
    "GraniteThinkingReasoningParser",
    "GraniteToolParser",
]

_CALL = '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}'


class GraniteToolParser(JsonCalls):
    """A list after a marker, which is a special token in 3.0 and text in 3.1."""

    name = "granite"
    api = 1
    openers = ("<|tool_call|>", "<tool_call>")
    examples = (weather(f"<|tool_call|>[{_CALL}]"), weather(f"<tool_call>[{_CALL}]"))


class Granite20bToolParser(JsonCalls):
    """A marker before each object, none after it."""

    name = "granite-20b-fc"
    api = 1
    openers = ("<function_call>",)
    examples = (
        weather(f"<function_call> {_CALL}"),
        weather(f"<function_call> {_CALL}\n<function_call> {_CALL}", count=2),
    )


class Granite4ToolParser(JsonCalls):
    """As Hermes, with text before and between calls."""

    name = "granite4"
    api = 1
    openers = ("<tool_call>",)
    closers = ("</tool_call>",)
    examples = (
        weather(f"<tool_call>\n{_CALL}\n</tool_call>"),
        weather(
            f"First:\n<tool_call>\n{_CALL}\n</tool_call>\nthen\n<tool_call>\n{_CALL}\n</tool_call>",
            "First:\nthen",
            count=2,
        ),
    )


class GraniteReasoningParser(Thoughts):
    """Two fixed sentences, or the tags of 3.3; a message without them is an answer."""

    name = "granite"
    api = 1
    opening = ("Here is my thought process:", "Here's my thought process:", "<think>")
    closing = ("Here is my response:", "Here's my response:", "</think>")
    framing = ("<response>", "</response>")
    prompt_opens = False
    examples = (
        thought("Here is my thought process:\nHm.\n\nHere is my response:\nHi"),
        thought("Here's my thought process: Hm. Here's my response: Hi"),
        thought("<think>Hm.</think><response>Hi</response>"),
        Example("Hi", "Hi"),
    )


class GraniteThinkingReasoningParser(Thoughts):
    """The tags of Granite 4.2."""

    name = "granite_thinking_parser"
    api = 1
    switches = ("enable_thinking",)
    ends = ("<tool_call>",)
    examples = (
        thought("Hm.\n</think>\nHi"),
        Example("Hi", "Hi", context=ParseContext(template_kwargs={"enable_thinking": False})),
    )
