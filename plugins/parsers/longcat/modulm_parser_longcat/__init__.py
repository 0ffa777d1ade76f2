"""Tool calls of Meituan LongCat-Flash: JSON between `<longcat_tool_call>` tags.

Source: the chat template of LongCat-Flash. Reasoning is that of `deepseek_r1`.
"""

from __future__ import annotations

from modulm_parsing import JsonCalls
from modulm_parsing.examples import weather

__all__ = ["LongcatToolParser"]


class LongcatToolParser(JsonCalls):
    """As Hermes, with other tags."""

    name = "longcat"
    api = 1
    openers = ("<longcat_tool_call>",)
    closers = ("</longcat_tool_call>",)
    examples = (
        weather(
            '<longcat_tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}'
            "\n</longcat_tool_call>"
        ),
    )
