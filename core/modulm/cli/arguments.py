"""The command line as users of vLLM type it, rewritten into one form before Click parses it.

`--max_model_len` means `--max-model-len`; `--json-arg.key.sub 1` and `--json-arg.list+ a,b` build
one JSON value; `-O3` is an optimization level; a list flag takes all words up to the next flag.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, mutable

from modulm.errors import ConfigError

if TYPE_CHECKING:
    import click

__all__ = ["Shapes", "TakesFlags", "normalize"]


class TakesFlags(Protocol):
    """A command that takes the engine's flags (`modulm.cli.options.FlagCommand`)."""

    server: bool
    fixed: frozenset[str]
    params: list[click.Parameter]

    @property
    def flag_options(self) -> list[click.Option]: ...

    def get_params(self, ctx: click.Context) -> list[click.Parameter]: ...


@mutable
class Shapes:
    """What the options of one command take. Names are long options with dashes."""

    tables: frozenset[str]
    lists: frozenset[str]
    takes_value: Callable[[str], bool]
    #: short option -> its long form
    shorts: Mapping[str, str] = field(factory=dict)

    def long(self, name: str) -> str:
        """The long form of a short option; a long option with dashes for underscores."""
        return self.shorts.get(name, name.replace("_", "-") if name.startswith("--") else name)


def normalize(args: list[str], shapes: Shapes) -> list[str]:
    """The same arguments, with tables gathered and list flags repeated once per word.

    Raises ConfigError for a dotted argument that fits no table.
    """
    tables: dict[str, Any] = {}
    plain = list(_plain(list(args), shapes, tables))
    gathered = [f"{name}={json.dumps(value)}" for name, value in tables.items()]
    if "--" in plain:
        place = plain.index("--")
        return [*plain[:place], *gathered, *plain[place:]]
    return [*plain, *gathered]


def _plain(rest: list[str], shapes: Shapes, tables: dict[str, Any]) -> Iterator[str]:
    """Every argument that is not part of a table, rewritten; tables are filled on the way."""
    while rest:
        word = rest.pop(0)
        if word == "--":
            yield from (word, *rest)
            return
        if not _is_option(word):
            yield word
            continue
        name, equals, value = _optimization(word, rest).partition("=")
        base, dot, path = name.partition(".")
        base = shapes.long(base)
        given = value if equals else None
        if base in shapes.tables:
            _gather(tables, base, path if dot else "", _value(base, given, rest))
        elif dot:
            raise ConfigError(_field(base), f"takes no keys, so {name} means nothing")
        elif base in shapes.lists:
            yield from (f"{base}={item}" for item in _words(base, given, rest))
        elif given is not None:
            yield f"{base}={given}"
        else:
            yield base
            if shapes.takes_value(base) and rest:
                yield rest.pop(0)


def _is_option(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not word[1].isdigit()


def _field(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _optimization(word: str, rest: list[str]) -> str:
    """`-O3`, `-O 3` and `-O=3` as a level; `-O {...}` and `-O.key v` as the compilation config."""
    if not word.startswith("-O"):
        return word
    tail = word[2:].removeprefix("=")
    if not tail and rest:
        tail = rest.pop(0)
    if word.startswith("-O."):
        return f"--compilation-config{word[2:]}"
    if tail.isdigit():
        return f"--optimization-level={tail}"
    return f"--compilation-config={tail}"


def _value(name: str, given: str | None, rest: list[str]) -> str:
    if given is not None:
        return given
    if not rest:
        raise ConfigError(_field(name), "needs a value")
    return rest.pop(0)


def _words(name: str, given: str | None, rest: list[str]) -> list[str]:
    """The words of a list flag: the one after `=`, or all up to the next flag."""
    if given is not None:
        return [given]
    words: list[str] = []
    while rest and not _is_option(rest[0]):
        words.append(rest.pop(0))
    if not words:
        raise ConfigError(_field(name), "needs a value")
    return words


def _gather(tables: dict[str, Any], name: str, path: str, text: str) -> None:
    """Put one value into the table that is being built for `name`."""
    if not path:
        value = _parsed(text)
        if not isinstance(value, dict):
            if value is None:
                return
            raise ConfigError(_field(name), f"{text!r} is not a JSON object")
        tables[name] = _merged(tables.get(name, {}), value)
        return
    *parents, last = path.split(".")
    place = tables.setdefault(name, {})
    for key in parents:
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            raise ConfigError(_field(name), f"{key} is a value and a table at once in {path}")
    if last.endswith("+"):
        place.setdefault(last[:-1], []).extend(_parsed(item) for item in text.split(","))
    else:
        place[last] = _parsed(text)


def _parsed(text: str) -> Any:
    """JSON where it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    merged = dict(first)
    for key, value in second.items():
        both = isinstance(merged.get(key), dict) and isinstance(value, dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
