"""Thoughts of earlier turns: told to a template once, in the form that it reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from modulm.errors import RequestError

__all__ = ["NAMES", "place_thoughts", "take_thought"]

#: One text under the names that templates know it by.
NAMES = ("reasoning_content", "reasoning", "thinking")


def _reads(names: str) -> re.Pattern[str]:
    """A template reads a field of a message: as an attribute, as a key, or by asking for it."""
    return re.compile(
        rf"""\.\s*(?:{names})\b(?!\s*\()"""
        rf"""|(?:\[|get\()\s*['"](?:{names})['"]|['"](?:{names})['"]\s+in\b"""
    )


_FIELD, _THINKING = _reads("reasoning_content|reasoning"), _reads("thinking")
#: It tells parts of contents apart that are thoughts.
_PART = re.compile(r"""==\s*['"]thinking['"]|['"]thinking['"]\s*==""")
#: It looks for the end of a thought in contents.
_INLINE = re.compile(r"""\(\s*['"]</think>['"]\s*\)|['"]</think>['"]\s+(?:not\s+)?in\b""")


def take_thought(index: int, message: Mapping[str, Any]) -> tuple[Any, str | None]:
    """(content without thoughts, the thought) of a message, however it was written.

    It may stand in a field, in parts of the content, or both. Raises RequestError.
    """
    content = message.get("content")
    thought = next((message[name] for name in NAMES if message.get(name) is not None), None)
    if thought is not None and not isinstance(thought, str):
        raise RequestError(f"messages[{index}]: reasoning is text", "messages")
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


def _text(index: int, given: Any) -> str:
    """The text of a part: a string, or a list of text parts."""
    parts = given if isinstance(given, list) else [given]
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"messages[{index}]: a thinking part holds text", "messages")
    return "".join(texts)


def _without(content: str, thought: str) -> str:
    """The content without the same thought between tags at its beginning."""
    begun = content.lstrip()
    inner, closed, rest = begun.removeprefix("<think>").partition("</think>")
    same = begun.startswith("<think>") and closed and inner.strip() == thought.strip()
    return rest.lstrip() if same else content


def place_thoughts(conversation: Sequence[dict[str, Any]], source: str) -> None:
    """Put thoughts into the contents of a template that reads them there.

    One that reads a field has it already; one that reads neither is told nothing.
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
    """How a template reads thoughts: in a `field`, as a `part`, `inline`, or not at all ("").

    It is looked at as text: one that a client sends must not be parsed here.
    """
    if _FIELD.search(source):
        return "field"
    if _PART.search(source):
        return "part"
    if _THINKING.search(source):
        return "field"
    return "inline" if _INLINE.search(source) else ""
