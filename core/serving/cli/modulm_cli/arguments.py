"""Rewrites vLLM's command-line syntax into plain options before Click parses them.

`--max_model_len` becomes `--max-model-len`. `--json-arg.key.sub 1` and `--json-arg.list+ a,b`
build one JSON value. `-O3` is an optimization level. A list flag takes all arguments up to the
next flag.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, mutable

from modulm.contracts.flags import Flag
from modulm.errors import ConfigError

if TYPE_CHECKING:
    import click

__all__ = ["Shapes", "TakesFlags", "normalize"]


class TakesFlags(Protocol):
    """A command that takes the engine's flags (`modulm_cli.FlagCommand`)."""

    server: bool
    fixed: frozenset[str]
    params: list[click.Parameter]

    @property
    def flag_options(self) -> list[click.Option]: ...

    def get_params(self, ctx: click.Context) -> list[click.Parameter]: ...


@mutable
class Shapes:
    """How the options of one command are parsed. Names are long options with dashes."""

    tables: frozenset[str]
    lists: frozenset[str]
    takes_value: Callable[[str], bool]
    #: short option -> its long form
    shorts: Mapping[str, str] = field(factory=dict)
    #: all options, long and short
    names: frozenset[str] = frozenset()
    #: finds a flag that the command lacks but another package has, by flat or short name
    known: Callable[[str], Flag | None] = lambda name: None

    def long(self, name: str) -> str:
        """The long form of a short option; a long option with dashes for underscores."""
        return self.shorts.get(name, name.replace("_", "-") if name.startswith("--") else name)


def normalize(args: list[str], shapes: Shapes) -> tuple[list[str], dict[str, Any]]:
    """Rewrite arguments for Click: one JSON value per table, list flags repeated once per item.

    Returns (arguments, values of known flags that the command lacks, by flat name). Raises
    ConfigError for a dotted argument that belongs to no table.
    """
    reader = _Reader(shapes, list(args))
    plain = list(reader.click_arguments())
    gathered = [f"{name}={json.dumps(value)}" for name, value in reader.tables.items()]
    end = plain.index("--") if "--" in plain else len(plain)
    return [*plain[:end], *gathered, *plain[end:]], reader.known


@mutable
class _Reader:
    """Consumes the `remaining` arguments; collects `tables` and `known` flags on the way."""

    shapes: Shapes
    remaining: list[str]
    tables: dict[str, Any] = field(factory=dict)
    known: dict[str, Any] = field(factory=dict)

    def click_arguments(self) -> Iterator[str]:
        """Yield the rewritten arguments for Click."""
        while self.remaining:
            word = self.remaining.pop(0)
            if word == "--":
                yield from (word, *self.remaining)
                return
            if not _is_option(word):
                yield word
                continue
            name, equals, value = _optimization(word, self.remaining).partition("=")
            base, dot, path = name.partition(".")
            yield from self._option(self.shapes.long(base), path, dot, value if equals else None)

    def _option(self, base: str, path: str, dot: str, inline_value: str | None) -> Iterator[str]:
        """Yield one option, with its value where the next option depends on it."""
        spec = None if base in self.shapes.names else self._known_flag(base)
        if base in self.shapes.tables:
            _gather(self.tables, base, path, self._value(base, inline_value))
        elif spec is not None and spec.is_table:
            _gather(self.known, spec.name, path, self._value(base, inline_value))
        elif dot:
            raise ConfigError(_field(base), f"takes no keys, so {base}.{path} is invalid")
        elif spec is not None:
            self.known[spec.name] = self._read(spec, base, inline_value)
        elif base in self.shapes.lists:
            yield from (f"{base}={item}" for item in self._items(base, inline_value))
        elif inline_value is not None:
            yield f"{base}={inline_value}"
        else:
            yield base
            if self.shapes.takes_value(base) and self.remaining:
                yield self.remaining.pop(0)

    def _known_flag(self, base: str) -> Flag | None:
        """The flag of a long or short name that the command lacks."""
        name = _field(base) if base.startswith("--") else base
        spec = self.shapes.known(name)
        if spec is None and name.startswith("no_"):
            spec = self.shapes.known(name.removeprefix("no_"))
            return spec if spec is not None and spec.is_switch else None
        return spec

    def _read(self, spec: Flag, base: str, inline_value: str | None) -> Any:
        if spec.is_switch:
            return inline_value if inline_value is not None else not base.startswith("--no-")
        if not spec.is_list:
            return self._value(base, inline_value)
        items = [*self.known.get(spec.name, ()), *self._items(base, inline_value)]
        return items[0] if items[0].lstrip().startswith("[") else items

    def _value(self, name: str, inline_value: str | None) -> str:
        if inline_value is not None:
            return inline_value
        if not self.remaining:
            raise ConfigError(_field(name), "needs a value")
        return self.remaining.pop(0)

    def _items(self, name: str, inline_value: str | None) -> list[str]:
        """The items of a list flag: the one after `=`, or all up to the next flag."""
        if inline_value is not None:
            return [inline_value]
        items: list[str] = []
        while self.remaining and not _is_option(self.remaining[0]):
            items.append(self.remaining.pop(0))
        if not items:
            raise ConfigError(_field(name), "needs a value")
        return items


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


def _gather(tables: dict[str, Any], name: str, path: str, text: str) -> None:
    """Add one value to the table of the option `name`."""
    if not path:
        value = _parsed(text)
        if not isinstance(value, dict):
            if value is None:
                return
            raise ConfigError(_field(name), f"{text!r} is not a JSON object")
        tables[name] = _merged(tables.get(name, {}), value)
        return
    *parents, last = path.split(".")
    table = tables.setdefault(name, {})
    for key in parents:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(_field(name), f"{key} in {path} is both a value and a table")
    if last.endswith("+"):
        table.setdefault(last[:-1], []).extend(_parsed(item) for item in text.split(","))
    else:
        table[last] = _parsed(text)


def _parsed(text: str) -> Any:
    """Parse JSON; any other text stays as it is."""
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
