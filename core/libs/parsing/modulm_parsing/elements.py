"""Elements of structural tags: the JSON with which grammar backends constrain text.

The vocabulary is a subset of xgrammar's structural tags. Adjacent constants are joined, and common
prefixes of alternatives are factored out, because lexeme-based backends need to see where free text
ends.
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
    """JSON that conforms to a schema."""
    return {"type": "json_schema", "json_schema": dict(schema)}


def free_text(*excludes: str) -> Element:
    """Any text that contains none of these."""
    return {"type": "any_text", "excludes": list(dict.fromkeys(excludes))}


def regex(pattern: str) -> Element:
    """Text that matches the whole expression."""
    return {"type": "regex", "pattern": pattern}


def sequence(*parts: Element) -> Element:
    """The parts one after another."""
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
    """One of the parts."""
    distinct: list[Element] = []
    for part in parts:
        distinct += [part] if part not in distinct else []
    if len(distinct) == 1:
        return distinct[0]
    common = _common([_head(part) for part in distinct])
    if common:
        return sequence(const(common), either(*(_without(part, common) for part in distinct)))
    others = [part for part in distinct if part != const("")]
    alternatives: Element = {"type": "or", "elements": others} if len(others) > 1 else others[0]
    return alternatives if len(others) == len(distinct) else optional(alternatives)


def optional(part: Element) -> Element:
    """The part or nothing."""
    return {"type": "optional", "content": part}


def repeat(part: Element, low: int, high: int) -> Element:
    """The part, `low` to `high` times."""
    if high == 0:
        return const("")
    return {"type": "repeat", "min": low, "max": high, "content": part}


def members(parts: Sequence[tuple[Element, bool]], comma: str) -> Element:
    """Members separated by commas; each part is (member, whether it is required).

    Required members come first, so that the commas are unconditional.
    """
    ordered = [part for part, needed in parts if needed]
    loose = [part for part, needed in parts if not needed]
    tail = [optional(sequence(const(comma), part)) for part in loose]
    if ordered:
        rest = [sequence(const(comma), part) for part in ordered[1:]]
        return sequence(ordered[0], *rest, *tail)
    heads = [sequence(part, *tail[index + 1 :]) for index, part in enumerate(loose)]
    return either(const(""), *heads)


def _common(texts: Sequence[str]) -> str:
    """Return the common prefix of the texts."""
    least, most = min(texts), max(texts)
    same = next((at for at, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), None)
    return least if same is None else least[:same]


def _head(part: Element) -> str:
    first = part["elements"][0] if part["type"] == "sequence" else part
    return str(first["value"]) if first["type"] == "const_string" else ""


def _without(part: Element, common: str) -> Element:
    first, *rest = part["elements"] if part["type"] == "sequence" else [part]
    return sequence(const(first["value"][len(common) :]), *rest)
