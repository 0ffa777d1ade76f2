"""The messages of a chat request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modulm_server.json_body import bad_field

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["check_messages", "last_text"]

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Check roles and required fields. Raises ApiError(400)."""
    for index, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise bad_field(
                "messages", f"messages[{index}].role must be one of {', '.join(sorted(_ROLES))}"
            )
        if role == "tool" and not isinstance(message.get("tool_call_id"), str):
            raise bad_field("messages", f"messages[{index}].tool_call_id must be a string")
        if message.get("audio") is not None and not message.get("content"):
            raise bad_field(
                "messages",
                f"messages[{index}].audio: sound is not kept: send its transcript as content",
            )
        optional = role == "assistant" or role == "function"
        if message.get("content") is None and not optional:
            raise bad_field("messages", f"messages[{index}].content is missing")


def last_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the last message."""
    content = messages[-1].get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
