"""Flags: how they are declared, and how their values are parsed and checked.

A flag group is a class decorated with `@flag_group`, in the core or in a package that offers it
under `modulm.flags`. Each field is made by `flag(default, help, ...)` and annotated with its type.
The constructor's checks, the command-line option, the YAML key, the environment variable, the
`LLM(...)` keyword and the row in docs/config.md are all derived from that line.

No flag is silently ignored: it works, or its state says why a value has no effect or is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from enum import Enum
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

import attrs
from attrs import frozen

from modulm.errors import ConfigError
from modulm.structure import parse_int, structure_written

__all__ = [
    "API",
    "WORKS",
    "Flag",
    "FlagGroup",
    "Kind",
    "State",
    "check",
    "flag",
    "flag_group",
    "flags_of",
    "parse_int",
    "parser_name",
    "read",
    "read_mapping",
    "suggest",
]

API = 1

_KEY = "modulm.flag"


class Kind(Enum):
    """What setting a flag does.

    WORKS: what its help says. NO_EFFECT: nothing; a notice says why. RENAMED: sets another flag; a
    notice says which. For the others any value but the default is an error: REFUSED names what to
    use instead, NOT_YET the planned feature, NOT_INSTALLED the missing package.
    """

    WORKS = "works"
    NO_EFFECT = "no effect"
    RENAMED = "renamed"
    REFUSED = "refused"
    NOT_YET = "not supported yet"
    NOT_INSTALLED = "not installed"


#: Any value but the default is an error.
_UNSETTABLE = frozenset({Kind.REFUSED, Kind.NOT_YET, Kind.NOT_INSTALLED})


@frozen
class State:
    """A kind and, unless the flag works, the reason shown to the user."""

    kind: Kind
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.reason}"


WORKS = State(Kind.WORKS)


@frozen(kw_only=True)
class Flag:
    """The declaration of one flag.

    type: of its field. kind: a plugin kind; its installed names are choices, in addition to
    `choices`. key: name in the group's JSON table. nested: only set in that table.
    common: shown by plain --help. registers: the value is a Python file that registers drivers.
    """

    name: str = ""
    type: Any = None
    default: Any = None
    help: str = ""
    unit: str | None = None
    choices: tuple[str, ...] = ()
    kind: str | None = None
    aliases: tuple[str, ...] = ()
    state: State = WORKS
    deprecated: str | None = None
    least: float | None = None
    most: float | None = None
    key: str | None = None
    nested: bool = False
    secret: bool = False
    common: bool = False
    registers: bool = False
    parse: Callable[[Any], Any] | None = None

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The allowed types of a value, without None."""
        union = get_args(self.type) if get_origin(self.type) is UnionType else (self.type,)
        return tuple(kind for kind in union if kind is not NoneType)

    @property
    def optional(self) -> bool:
        return NoneType in get_args(self.type)

    @property
    def is_switch(self) -> bool:
        return self.kinds == (bool,)

    @property
    def is_list(self) -> bool:
        return get_origin(self.kinds[0]) is tuple

    @property
    def is_table(self) -> bool:
        return get_origin(self.kinds[0]) is Mapping

    @property
    def option(self) -> str:
        """The long command-line name."""
        return "--" + self.name.replace("_", "-")

    def changed(self, value: Any) -> bool:
        """Whether `value` differs from the default."""
        return bool(value != self.default)


def flag(default: Any, help: str, **options: Any) -> Any:  # noqa: A002
    """Declare a field of a flag group; `options` are attributes of `Flag`."""
    options.setdefault("nested", not options.pop("own", True))  # `own` is its former opposite.
    spec = Flag(default=default, help=help, **options)
    if isinstance(default, dict):
        return attrs.field(factory=lambda: dict[str, Any](default), metadata={_KEY: spec})
    return attrs.field(default=default, metadata={_KEY: spec})


class FlagGroup:
    """Base class of flag groups.

    title: heading in help. table: JSON flag that sets the whole group, if any; table_aliases: its
    short names. server: only commands that run a server have these flags.
    """

    title: ClassVar[str] = ""
    table: ClassVar[str | None] = None
    table_aliases: ClassVar[tuple[str, ...]] = ()
    server: ClassVar[bool] = False


G = TypeVar("G", bound=FlagGroup)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def flag_group(cls: type[G]) -> type[G]:
    """Turn a class of flags into a frozen attrs class that parses and checks each flag."""
    return attrs.frozen(kw_only=True, field_transformer=_equip)(cls)


def _equip(cls: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """Add a converter and a validator to each field (attrs `field_transformer`)."""
    types = get_type_hints(cls)
    return [_equipped(field, types[field.name]) for field in fields]


_TYPES = frozenset({bool, int, float, str})


def _equipped(field: attrs.Attribute[Any], kind: Any) -> attrs.Attribute[Any]:
    described = attrs.evolve(field.metadata[_KEY], name=field.name, type=kind)
    known = described.kinds[0] in _TYPES or described.is_list or described.is_table
    if not known and described.parse is None:
        raise TypeError(f"flag {field.name}: no way to read a value of type {kind!r}")

    def convert(value: Any) -> Any:
        return read(described, value)

    def validate(_instance: Any, _attribute: Any, value: Any) -> None:
        check(described, value)

    return field.evolve(
        converter=convert, validator=validate, metadata={**field.metadata, _KEY: described}
    )


def flags_of(group: type[FlagGroup]) -> tuple[Flag, ...]:
    """Return the flags of a group class, in order of declaration."""
    return tuple(field.metadata[_KEY] for field in attrs.fields(group))  # type: ignore[arg-type]


def read(spec: Flag, value: Any) -> Any:
    """Convert a value to its field's type. Raises ConfigError naming the flag."""
    if value is spec.default or (spec.parse is None and spec.optional and _is_none(spec, value)):
        return value if value is spec.default else None
    try:
        return structure_written(value, spec.type) if spec.parse is None else spec.parse(value)
    except (ValueError, TypeError) as error:
        raise ConfigError(spec.name, str(error)) from error


def _is_none(spec: Flag, value: Any) -> bool:
    """Whether a text means "not set". A plugin may be called "none", but not "None"."""
    return isinstance(value, str) and (
        value == "None" or (value.lower() == "none" and spec.kind is None)
    )


def parser_name(value: str | None) -> str | None:
    """Normalize a parser's name: "auto" becomes None (chosen automatically), "none" becomes ""."""
    if value is not None and not isinstance(value, str):
        raise TypeError("must be a name")
    return None if value in ("auto", "None") else "" if value == "none" else value


def check(spec: Flag, value: Any) -> None:
    """Raise ConfigError for a missing value, wrong choice, bad range or a refused flag."""
    if value is None and not spec.optional:
        raise ConfigError(spec.name, f"needs a value; the default is {spec.default!r}")
    if spec.choices and spec.kind is None and isinstance(value, str):
        _check_choice(spec, value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        _check_range(spec, value)
    if spec.state.kind in _UNSETTABLE and spec.changed(value):
        raise ConfigError(spec.name, str(spec.state))


def _check_choice(spec: Flag, value: str) -> None:
    if value not in spec.choices:
        known = ", ".join(spec.choices)
        raise ConfigError(
            spec.name, f"{value!r} is not one of {known}{suggest(value, spec.choices)}"
        )


def _check_range(spec: Flag, value: float) -> None:
    unit = f" {spec.unit}" if spec.unit else ""
    if value != value:
        raise ConfigError(spec.name, "is not a number")
    if spec.least is not None and value < spec.least:
        raise ConfigError(spec.name, f"{value} is below the minimum {spec.least}{unit}")
    if spec.most is not None and value > spec.most:
        raise ConfigError(spec.name, f"{value} is above the maximum {spec.most}{unit}")


def suggest(word: str, known: tuple[str, ...] | list[str]) -> str:
    """Return `; did you mean 'x'?`, or "" if no known name is close."""
    close = get_close_matches(word, known, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def read_mapping(name: str, value: Any) -> Mapping[str, Any]:
    """Read a table from a mapping or JSON. Raises ConfigError for the flag `name`."""
    try:
        table: Mapping[str, Any] = structure_written(value, Mapping[str, Any])
    except (ValueError, TypeError) as error:
        raise ConfigError(name, str(error)) from error
    return table
