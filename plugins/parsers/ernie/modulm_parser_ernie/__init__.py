"""Baidu ERNIE 4.5 thinking models: reasoning that the prompt opens, an answer in `<response>`.

Source: the chat template of ERNIE 4.5 thinking.
"""

from __future__ import annotations

from modulm.contracts.parser import Example
from modulm_parsing import JsonCalls, Thoughts
from modulm_parsing.examples import thought, weather

__all__ = ["Ernie45ReasoningParser", "Ernie45ToolParser"]


class Ernie45ToolParser(JsonCalls):
    """JSON in `<tool_call>` tags."""

    name = "ernie45"
    api = 1
    openers = ("<tool_call>",)
    closers = ("</tool_call>",)
    framing = ("<response>", "</response>")
    examples = (
        weather(
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n'
            "</tool_call>\n"
        ),
        Example("<response>\nHi\n</response>\n", content="Hi"),
    )


class Ernie45ReasoningParser(Thoughts):
    """The tags around the answer are not part of it."""

    name = "ernie45"
    api = 1
    framing = ("<response>", "</response>")
    examples = (
        thought("Hm.\n</think>\n\n<response>\nHi\n</response>\n"),
        thought("Hm.\n</think>\n\nHi"),
    )
