"""The command line as users of vLLM type it, rewritten into one form before Click parses it.

`--max_model_len` means `--max-model-len`; `--json-arg.key.sub 1` and `--json-arg.list+ a,b` build
one JSON value; `-O3` is an optimization level; a list flag takes all words up to the next flag.
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
    """What the options of one command take. Names are long options with dashes."""

    tables: frozenset[str]
    lists: frozenset[str]
    takes_value: Callable[[str], bool]
    #: short option -> its long form
    shorts: Mapping[str, str] = field(factory=dict)
    #: all options, long and short
    names: frozenset[str] = frozenset()
    #: a flag that the command has not, by its flat or short name
    known: Callable[[str], Flag | None] = lambda name: None

    def long(self, name: str) -> str:
        """The long form of a short option; a long option with dashes for underscores."""
        return self.shorts.get(name, name.replace("_", "-") if name.startswith("--") else name)


def normalize(args: list[str], shapes: Shapes) -> tuple[list[str], dict[str, Any]]:
    """The same arguments, with tables gathered and list flags repeated once per word; and the
    values of flags that are known although the command has not got them, by flat name.

    Raises ConfigError for a dotted argument that fits no table.
    """
    reader = _Reader(shapes, list(args))
    plain = list(reader.plain())
    gathered = [f"{name}={json.dumps(value)}" for name, value in reader.tables.items()]
    place = plain.index("--") if "--" in plain else len(plain)
    return [*plain[:place], *gathered, *plain[place:]], reader.known


@mutable
class _Reader:
    """Takes words from `rest`; tables and flags that are only known are filled on the way."""

    shapes: Shapes
    rest: list[str]
    tables: dict[str, Any] = field(factory=dict)
    known: dict[str, Any] = field(factory=dict)

    def plain(self) -> Iterator[str]:
        """Every argument that goes to Click, rewritten."""
        while self.rest:
            word = self.rest.pop(0)
            if word == "--":
                yield from (word, *self.rest)
                return
            if not _is_option(word):
                yield word
                continue
            name, equals, value = _optimization(word, self.rest).partition("=")
            base, dot, path = name.partition(".")
            yield from self._option(self.shapes.long(base), path, dot, value if equals else None)

    def _option(self, base: str, path: str, dot: str, given: str | None) -> Iterator[str]:
        """One option, with its value where that is needed to find the next one."""
        spec = None if base in self.shapes.names else self._known(base)
        if base in self.shapes.tables:
            _gather(self.tables, base, path, self._value(base, given))
        elif spec is not None and spec.is_table:
            _gather(self.known, spec.name, path, self._value(base, given))
        elif dot:
            raise ConfigError(_field(base), f"takes no keys, so {base}.{path} means nothing")
        elif spec is not None:
            self.known[spec.name] = self._read(spec, base, given)
        elif base in self.shapes.lists:
            yield from (f"{base}={item}" for item in self._words(base, given))
        elif given is not None:
            yield f"{base}={given}"
        else:
            yield base
            if self.shapes.takes_value(base) and self.rest:
                yield self.rest.pop(0)

    def _known(self, base: str) -> Flag | None:
        """The flag that a long or short name means although the command has it not."""
        name = _field(base) if base.startswith("--") else base
        spec = self.shapes.known(name)
        if spec is None and name.startswith("no_"):
            spec = self.shapes.known(name.removeprefix("no_"))
            return spec if spec is not None and spec.is_switch else None
        return spec

    def _read(self, spec: Flag, base: str, given: str | None) -> Any:
        if spec.is_switch:
            return given if given is not None else not base.startswith("--no-")
        if not spec.is_list:
            return self._value(base, given)
        words = [*self.known.get(spec.name, ()), *self._words(base, given)]
        return words[0] if words[0].lstrip().startswith("[") else words

    def _value(self, name: str, given: str | None) -> str:
        if given is not None:
            return given
        if not self.rest:
            raise ConfigError(_field(name), "needs a value")
        return self.rest.pop(0)

    def _words(self, name: str, given: str | None) -> list[str]:
        """The words of a list flag: the one after `=`, or all up to the next flag."""
        if given is not None:
            return [given]
        words: list[str] = []
        while self.rest and not _is_option(self.rest[0]):
            words.append(self.rest.pop(0))
        if not words:
            raise ConfigError(_field(name), "needs a value")
        return words


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
