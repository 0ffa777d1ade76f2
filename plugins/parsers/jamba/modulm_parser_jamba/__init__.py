"""Tool calls of AI21 Jamba 1.5 to 1.7: one JSON list between `<tool_calls>` tags.

Source: the chat template of Jamba 1.5.
"""

from __future__ import annotations

from modulm_parsing import JsonCalls
from modulm_parsing.examples import weather

__all__ = ["JambaToolParser"]


class JambaToolParser(JsonCalls):
    """The tags are special tokens."""

    name = "jamba"
    api = 1
    openers = ("<tool_calls>",)
    closers = ("</tool_calls>",)
    examples = (
        weather(
            '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}]'
            "</tool_calls>"
        ),
    )
