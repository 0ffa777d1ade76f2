"""Tool calls of Sber GigaChat 3 and 3.1: one JSON object after a role or a marker.

Source: the chat templates of GigaChat 3.
"""

from __future__ import annotations

from modulm_parsing import JsonCalls
from modulm_parsing.examples import weather

__all__ = ["Gigachat3ToolParser"]

_CALL = '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}'


class Gigachat3ToolParser(JsonCalls):
    """The separator before the role is not content."""

    name = "gigachat3"
    api = 1
    openers = ("function call<|role_sep|>", "<|function_call|>")
    framing = ("<|message_sep|>",)
    words = ("<|role_sep|>",)
    examples = (
        weather(f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_CALL}"),
        weather(f"Let me see.<|message_sep|>\n\nfunction call<|role_sep|>\n{_CALL}", "Let me see."),
        weather(f"<|function_call|>{_CALL}"),
    )
