"""Pass the reasoning of earlier turns to a template, once, in the form that it reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from modulm.errors import RequestError

__all__ = ["NAMES", "place_thoughts", "take_thought"]

#: Names under which templates read a message's reasoning.
NAMES = ("reasoning_content", "reasoning", "thinking")


def _field_pattern(names: str) -> re.Pattern[str]:
    """Matches a template's access to a message field: as an attribute or key, or by `in`."""
    return re.compile(
        rf"""\.\s*(?:{names})\b(?!\s*\()"""
        rf"""|(?:\[|get\()\s*['"](?:{names})['"]|['"](?:{names})['"]\s+in\b"""
    )


_FIELD, _THINKING = _field_pattern("reasoning_content|reasoning"), _field_pattern("thinking")
#: Matches a comparison of a content part's type with "thinking".
_PART = re.compile(r"""==\s*['"]thinking['"]|['"]thinking['"]\s*==""")
#: Matches a search for the end of reasoning in contents.
_INLINE = re.compile(r"""\(\s*['"]</think>['"]\s*\)|['"]</think>['"]\s+(?:not\s+)?in\b""")


def take_thought(index: int, message: Mapping[str, Any]) -> tuple[Any, str | None]:
    """Split a message into (content without reasoning, reasoning).

    The reasoning may be in a field, in content parts, or both. Raises RequestError.
    """
    content = message.get("content")
    thought = next((message[name] for name in NAMES if message.get(name) is not None), None)
    if thought is not None and not isinstance(thought, str):
        raise RequestError(f"messages[{index}]: reasoning must be text", "messages")
    if message.get("role") != "assistant":
        return content, thought
    if isinstance(content, Sequence) and not isinstance(content, str):
        thoughts = [part for part in content if _is_thought(part)]
        content = [part for part in content if not _is_thought(part)]
        if thoughts and thought is None:
            thought = "".join(_text(index, part["thinking"]) for part in thoughts)
    elif isinstance(content, str) and thought is not None:
        content = _without(content, thought)
    return content, thought


def _is_thought(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "thinking" and "thinking" in part


def _text(index: int, value: Any) -> str:
    """The text of a part: a string, or a list of text parts."""
    parts = value if isinstance(value, list) else [value]
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"messages[{index}]: a thinking part must be text", "messages")
    return "".join(texts)


def _without(content: str, thought: str) -> str:
    """Remove the same reasoning, between tags, from the start of the content."""
    stripped = content.lstrip()
    inner, end_tag, rest = stripped.removeprefix("<think>").partition("</think>")
    same = stripped.startswith("<think>") and end_tag and inner.strip() == thought.strip()
    return rest.lstrip() if same else content


def place_thoughts(conversation: Sequence[dict[str, Any]], source: str) -> None:
    """Put reasoning into the contents if the template reads it there.

    Templates that read a field have it already. Templates that read neither get no reasoning.
    """
    form = _form(source)
    if form == "field":
        return
    for message in conversation:
        thought = message.get(NAMES[0])
        if not thought or message.get("role") != "assistant":
            continue
        content = message["content"]
        if form == "part" and isinstance(content, list):
            message["content"] = [{"type": "thinking", "thinking": thought}, *content]
        elif form == "inline" and isinstance(content, str) and "</think>" not in content:
            message["content"] = f"<think>\n{thought}\n</think>\n\n{content}"


@lru_cache(maxsize=32)
def _form(source: str) -> str:
    """Return how a template reads reasoning: in a `field`, as a `part`, `inline`, or "" (not).

    Matches text only: a client's template must not be parsed in this process.
    """
    if _FIELD.search(source):
        return "field"
    if _PART.search(source):
        return "part"
    if _THINKING.search(source):
        return "field"
    return "inline" if _INLINE.search(source) else ""
