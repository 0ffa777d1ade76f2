"""Translate xgrammar's structural tags to llguidance's Lark dialect.

llguidance splits text into the longest possible lexemes, so free text that is followed by something
becomes a lazy lexeme that ends at the first occurrence of an excluded text. Added tokens match by
id or by their spelling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["TagError", "as_lark"]

_ANYTHING = r"/(?s:.*)/"


class TagError(ValueError):
    """A structural tag, or a part of it, that Lark cannot express."""


def as_lark(
    element: Mapping[str, Any], added: Mapping[str, int], blanks: Mapping[str, object]
) -> str:
    """Return the Lark grammar of a tag's format.

    added: text -> id of the vocabulary's added tokens. blanks: llguidance's options for white space
    in JSON. Raises TagError.
    """
    writer = _Writer(added, blanks)
    start = writer.expression(element)
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.rules]) + "\n"


class _Writer:
    def __init__(self, added: Mapping[str, int], blanks: Mapping[str, object]) -> None:
        self.rules: list[str] = []
        self._added = {text: index for text, index in added.items() if text}
        spellings = sorted(map(re.escape, self._added), key=len, reverse=True)
        self._special = re.compile("|".join(spellings) or r"(?!)")
        self._blanks = blanks
        self._kinds: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "const_string": lambda e: self.literal(e["value"]),
            "json_schema": self._json,
            "regex": lambda e: _regex(e["pattern"]),
            "any_text": lambda e: self._rule(self._free(e)),
            "sequence": lambda e: self._sequence(e["elements"]),
            "or": lambda e: _grouped(map(self.expression, e["elements"])),
            "optional": lambda e: f"({self.expression(e['content'])})?",
            "star": lambda e: f"({self.expression(e['content'])})*",
            "plus": lambda e: f"({self.expression(e['content'])})+",
            "repeat": self._repeat,
            "tag": lambda e: self._sequence(_parts(e)),
            "tags_with_separator": self._separated,
            "triggered_tags": self._triggered,
        }

    def expression(self, element: Mapping[str, Any]) -> str:
        """Return the right-hand side of a rule for an element."""
        kind = element.get("type")
        if kind not in self._kinds:
            raise TagError(f"structural tags of type {str(kind)[:64]!r} are not supported")
        try:
            return self._kinds[kind](element)
        except (KeyError, TypeError, AttributeError) as error:
            raise TagError(f"{kind}: {error}") from error

    def literal(self, text: str) -> str:
        """Return an expression for the text. Empty text gives an empty result."""
        parts, end = [], 0
        for match in self._special.finditer(text):
            parts += [_quoted(text[end : match.start()])]
            parts += [f"({_quoted(match[0])} | <[{self._added[match[0]]}]>)"]
            end = match.end()
        parts += [_quoted(text[end:])]
        return " ".join(part for part in parts if part) or '""'

    def _rule(self, body: str, *, lazy: bool = False, terminal: bool = False) -> str:
        name = f"{'T' if terminal else 'r'}_{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _free(self, element: Mapping[str, Any]) -> str:
        """Return a terminal for free text."""
        for limit in ("max_tokens", "max_chars"):
            if element.get(limit) is not None:
                raise TagError(f"any_text with {limit} is not supported")
        excludes = element.get("excludes") or ()
        without = [f"~/(?s:.*){_plain(word)}(?s:.*)/" for word in excludes]
        return self._rule(" & ".join([_ANYTHING, *without]), terminal=True)

    def _sequence(self, elements: Sequence[Mapping[str, Any]]) -> str:
        parts: list[str] = []
        waiting = list(_flat(elements))
        while waiting:
            first = waiting.pop(0)
            if first.get("type") != "any_text" or not waiting:
                parts.append(self.expression(first))
                continue
            following = waiting.pop(0)
            text = following.get("value") if following.get("type") == "const_string" else None
            excluded = [
                w for w in first.get("excludes") or () if isinstance(text, str) and w in text
            ]
            if not isinstance(text, str) or not excluded:
                raise TagError("any_text must be followed by a text that it excludes")
            end = min(text.index(word) + len(word) for word in excluded)
            parts += [self._until(first, text[:end]), self.literal(text[end:])]
        return " ".join(part for part in parts if part != '""') or '""'

    def _until(self, free: Mapping[str, Any], stop: str) -> str:
        """Return a terminal for free text up to and including the first `stop`."""
        body = self._free(free)
        spelled = self._rule(f"{body} {_quoted(stop)}", lazy=True)
        last = [match for match in self._special.finditer(stop) if match.end() == len(stop)]
        if not last:
            return spelled
        before = _quoted(stop[: last[0].start()])
        text = self._rule(f"{body} {before}", terminal=True) if before else body
        token = self._rule(f"{text} <[{self._added[last[0][0]]}]>")
        return f"({spelled} | {token})"

    def _json(self, element: Mapping[str, Any]) -> str:
        if element.get("style", "json") != "json":
            raise TagError(f"json_schema in style {str(element['style'])[:64]!r} is not supported")
        schema = element["json_schema"]
        schema = {} if schema is True else schema
        if not isinstance(schema, Mapping):
            raise TagError("json_schema: must be an object")
        return "%json " + json.dumps({**schema, "x-guidance": dict(self._blanks)})

    def _repeat(self, element: Mapping[str, Any]) -> str:
        high = "" if element["max"] == -1 else int(element["max"])
        inner = self._rule(self.expression(element["content"]))
        return f"{inner}{{{int(element['min'])},{high}}}"

    def _separated(self, element: Mapping[str, Any]) -> str:
        tag = self._rule(_grouped(self._sequence(_parts(each)) for each in element["tags"]))
        several = f"{tag} ({self.literal(element['separator'])} {tag})*"
        body = tag if element.get("stop_after_first") else several
        return body if element.get("at_least_one") else f"({body})?"

    def _triggered(self, element: Mapping[str, Any]) -> str:
        """Return a rule for free text in which a trigger starts one of its tags."""
        free = {"type": "any_text", "excludes": [*element["triggers"]]}
        tags = []
        for each in element["tags"]:
            trigger = next((t for t in element["triggers"] if each["begin"].startswith(t)), None)
            if trigger is None:
                raise TagError(f"no trigger begins {each['begin']!r}")
            tags.append(self._sequence([free, *_parts(each)]))
        one = self._rule(_grouped(tags))
        rest = self._rule(self._free({**free, "excludes": [
            *free["excludes"], *element.get("excludes", ()),
        ]}))  # fmt: skip
        first, once = bool(element.get("at_least_one")), bool(element.get("stop_after_first"))
        if once:
            return one if first else f"({one} | {rest})"
        return f"{one}{'+' if first else '*'} {rest}"


def _flat(elements: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Flatten nested sequences and join adjacent texts."""
    flat: list[Mapping[str, Any]] = []
    for element in elements:
        kind = element.get("type")
        inner = _flat(element["elements"]) if kind == "sequence" else [element]
        if kind == "tag":
            inner = _flat(_parts(element))
        for each in inner:
            if flat and flat[-1].get("type") == each.get("type") == "const_string":
                flat[-1] = {**each, "value": flat[-1]["value"] + each["value"]}
            elif each.get("type") != "const_string" or each["value"]:
                flat.append(each)
    return flat


def _parts(tag: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    begin, end = tag["begin"], tag["end"]
    for text in (begin, *(end if isinstance(end, list) else [end])):
        if not isinstance(text, str):
            raise TagError("tags that begin or end with a token by its id are not supported")
    ends = [{"type": "const_string", "value": text} for text in
            (end if isinstance(end, list) else [end])]  # fmt: skip
    last = ends[0] if len(ends) == 1 else {"type": "or", "elements": ends}
    return [{"type": "const_string", "value": begin}, tag["content"], last]


def _grouped(several: Any) -> str:
    return f"({' | '.join(several)})"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _plain(text: str) -> str:
    """Escape text for a regular expression between slashes."""
    escaped = re.sub(r"[\\.^$|?*+()\[\]{}/]", lambda match: "\\" + match[0], text)
    return escaped.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")


def _regex(pattern: str) -> str:
    slashes = re.sub(r"\\.|/", lambda m: "\\/" if m[0] == "/" else m[0], pattern, flags=re.DOTALL)
    return f"/{slashes.replace(chr(10), chr(92) + 'n')}/"
