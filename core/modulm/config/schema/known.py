"""Flags that users of vLLM bring and that no installed package has, from `known_flags.toml`.

The file is read when a name is met that no group of flags has, and never otherwise.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from attrs import evolve, frozen

from modulm.contracts.flags import Flag, Kind, State, check, read
from modulm.plugins.index import to_install

__all__ = ["KnownFlag", "find_known", "known_flags", "read_known"]

_TYPES: dict[str, Any] = {
    "bool": bool | None,
    "int": int | None,
    "float": float | None,
    "str": str | None,
    "list": tuple[str, ...] | None,
    "ints": tuple[int, ...] | None,
    "json": Mapping[str, Any] | None,
}
#: Values that request nothing, whatever the default.
_NOTHING: tuple[object, ...] = (None, (), {}, False)


@frozen(kw_only=True)
class KnownFlag(Flag):
    """A flag of the file: `package` has it or is to bring it, `target` is its new name."""

    package: str = ""
    target: str = ""

    def changed(self, value: Any) -> bool:
        """Whether a value requests something."""
        return value != self.default and (value not in _NOTHING or self.default is True)


@cache
def known_flags() -> Mapping[str, KnownFlag]:
    """Return the file's flags by flat name, in order."""
    text = files("modulm.config").joinpath("known_flags.toml").read_text(encoding="utf-8")
    flags = (flag for table in tomllib.loads(text).values() for flag in _section(table))
    return {spec.name: spec for spec in flags}


def _section(table: Mapping[str, Any]) -> Iterator[KnownFlag]:
    state, reason = Kind(table["state"]), table.get("reason", "")
    package = table.get("package", "")
    if state is Kind.NOT_INSTALLED:
        reason += to_install(package)
    for names, text in table["flags"].items():
        yield evolve(_flag(names, text, state, reason), package=package)


def _flag(names: str, text: str, state: Kind, reason: str) -> KnownFlag:
    """One line: `"option -alias" = "type default # reason"`; a type may be its choices, a|b."""
    option, *aliases = names.split()
    declared, _, remark = text.partition(" # ")
    kind, _, default = declared.partition(" ")
    spec = KnownFlag(
        name=option.replace("-", "_"),
        type=_TYPES.get(kind, str | None),
        choices=() if kind in _TYPES else tuple(kind.split("|")),
        aliases=tuple(aliases),
    )
    renamed = state is Kind.RENAMED
    value: Any = default or None
    if default and default not in spec.choices:
        value = read(spec, default.split() if spec.is_list else default)
    return evolve(
        spec,
        default=value,
        state=State(state, f"use --{remark}; {reason}" if renamed else remark or reason),
        target=remark.replace("-", "_") if renamed else "",
    )


@cache
def _short_names() -> Mapping[str, KnownFlag]:
    return {alias: spec for spec in known_flags().values() for alias in spec.aliases}


def find_known(name: str) -> KnownFlag | None:
    """Return the file's flag with this flat name (`max_loras`) or short name (`-tp`)."""
    return known_flags().get(name) or _short_names().get(name)


def read_known(spec: KnownFlag, value: Any) -> Any:
    """Parse a value; None if it requests nothing or may be ignored.

    Raises ConfigError naming the flag if it cannot be set.
    """
    parsed = read(spec, value)
    check(spec, parsed)
    return parsed if spec.changed(parsed) else None
