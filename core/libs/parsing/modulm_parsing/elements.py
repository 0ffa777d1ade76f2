"""The parts of a structural tag: what grammar backends hold a text to, as JSON.

The vocabulary is that of xgrammar's structural tags, of which these are enough for calls. Texts
that stand side by side are joined and what alternatives begin with in common stands before them:
backends that read text by lexemes need to see where a free text ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "Element",
    "const",
    "either",
    "free_text",
    "json_value",
    "members",
    "optional",
    "regex",
    "repeat",
    "sequence",
]

Element = dict[str, Any]


def const(value: str) -> Element:
    """This text."""
    return {"type": "const_string", "value": value}


def json_value(schema: Mapping[str, object]) -> Element:
    """JSON of a schema."""
    return {"type": "json_schema", "json_schema": dict(schema)}


def free_text(*excludes: str) -> Element:
    """Any text that holds none of these."""
    return {"type": "any_text", "excludes": list(dict.fromkeys(excludes))}


def regex(pattern: str) -> Element:
    """A text that the expression matches as a whole."""
    return {"type": "regex", "pattern": pattern}


def sequence(*parts: Element) -> Element:
    """One behind the other."""
    joined: list[Element] = []
    for part in parts:
        for each in part["elements"] if part["type"] == "sequence" else (part,):
            if each == const(""):
                continue
            if joined and joined[-1]["type"] == each["type"] == "const_string":
                joined[-1] = const(joined[-1]["value"] + each["value"])
            else:
                joined.append(each)
    if not joined:
        return const("")
    return joined[0] if len(joined) == 1 else {"type": "sequence", "elements": joined}


def either(*parts: Element) -> Element:
    """One of these."""
    several: list[Element] = []
    for part in parts:
        several += [part] if part not in several else []
    if len(several) == 1:
        return several[0]
    common = _common([_head(part) for part in several])
    if common:
        return sequence(const(common), either(*(_without(part, common) for part in several)))
    others = [part for part in several if part != const("")]
    found: Element = {"type": "or", "elements": others} if len(others) > 1 else others[0]
    return found if len(others) == len(several) else optional(found)


def optional(part: Element) -> Element:
    """This, or nothing."""
    return {"type": "optional", "content": part}


def repeat(part: Element, low: int, high: int) -> Element:
    """This, `low` to `high` times."""
    if high == 0:
        return const("")
    return {"type": "repeat", "min": low, "max": high, "content": part}


def members(parts: Sequence[tuple[Element, bool]], comma: str) -> Element:
    """Members with commas between them; (a member, whether it must be there).

    Those that must be there come first: then the commas depend on nothing.
    """
    ordered = [part for part, needed in parts if needed]
    loose = [part for part, needed in parts if not needed]
    tail = [optional(sequence(const(comma), part)) for part in loose]
    if ordered:
        rest = [sequence(const(comma), part) for part in ordered[1:]]
        return sequence(ordered[0], *rest, *tail)
    heads = [sequence(part, *tail[place + 1 :]) for place, part in enumerate(loose)]
    return either(const(""), *heads)


def _common(texts: Sequence[str]) -> str:
    """What all texts begin with."""
    least, most = min(texts), max(texts)
    same = next((at for at, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), None)
    return least if same is None else least[:same]


def _head(part: Element) -> str:
    first = part["elements"][0] if part["type"] == "sequence" else part
    return str(first["value"]) if first["type"] == "const_string" else ""


def _without(part: Element, common: str) -> Element:
    first, *rest = part["elements"] if part["type"] == "sequence" else [part]
    return sequence(const(first["value"][len(common) :]), *rest)
