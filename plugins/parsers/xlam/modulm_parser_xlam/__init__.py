"""Tool calls of Salesforce xLAM: a bare JSON list, or one after a marker of another format.

Source: the chat templates of the Llama and Qwen based xLAM models.
"""

from __future__ import annotations

from modulm.contracts.parser import Example
from modulm_parsing import CallKeys, JsonCalls
from modulm_parsing.examples import weather

__all__ = ["XlamToolParser"]

_LIST = '[{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}]'


class XlamToolParser(JsonCalls):
    """A list with anything but calls is content."""

    name = "xlam"
    api = 1
    openers = ("[TOOL_CALLS]", "<tool_call>", "```json", "```", "</think>")
    closers = ("</tool_call>", "```")
    bare = "[{"
    keys = CallKeys(needed=True)
    examples = (
        weather(_LIST),
        weather(f"Let me see.\n```json\n{_LIST}\n```", "Let me see."),
        weather(f"[TOOL_CALLS]{_LIST}"),
        weather(f"<tool_call>{_LIST}</tool_call>"),
        weather(f"<think>Hm.</think>\n{_LIST}", "<think>Hm."),
        Example('```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```'),
        Example("[1, 2]", "[1, 2]"),
    )
