"""How one flag is described, and how a value given for it becomes a checked one.

A field of a group is made by `flag(default, help, ...)`; its annotation says its type. From that
one line come the constructor's check, the command-line option, the YAML key, the name in the
environment, the `LLM(...)` keyword and the row in docs/config.md.

A flag is in one of four states, and nothing is silently ignored:

works      it does what its help says;
no effect  it is accepted, and a notice says why nothing changes;
refused    any value but the default is an error that names what to use instead;
not yet    the feature is planned: any value but the default is an error that says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from enum import Enum
from typing import Any, ClassVar

import attrs
from attrs import frozen

from modulm.errors import ConfigError

__all__ = [
    "WORKS",
    "Flag",
    "Kind",
    "State",
    "check",
    "equip",
    "flag",
    "flags_of",
    "later",
    "no_effect",
    "parse_int",
    "read",
    "read_mapping",
    "refused",
    "suggest",
]

_KEY = "modulm.flag"


class Kind(Enum):
    """What a flag does today."""

    WORKS = "works"
    NO_EFFECT = "no effect"
    REFUSED = "refused"
    NOT_YET = "not yet"


@frozen
class State:
    """A kind and, for all but `works`, the reason that the user reads."""

    kind: Kind
    reason: str = ""


WORKS = State(Kind.WORKS)


def no_effect(reason: str) -> State:
    """Accepted; the notice says why nothing changes."""
    return State(Kind.NO_EFFECT, reason)


def refused(instead: str) -> State:
    """Never possible here; `instead` says what to use."""
    return State(Kind.REFUSED, instead)


def later(feature: str) -> State:
    """Planned; `feature` is what has to exist first."""
    return State(Kind.NOT_YET, feature)


@frozen(kw_only=True)
class Flag:
    """Everything known about one flag; `type` is the field's annotation as written.

    `kind` is a plugin kind whose installed names are the choices (plus `choices`).
    `key` is its name inside the group's JSON table; `own` is false when it has no flag of its own.
    """

    name: str = ""
    type: str = ""
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
    own: bool = True
    secret: bool = False
    parse: Callable[[Any], Any] | None = None

    #: annotations that the sources know how to read
    TYPES: ClassVar[frozenset[str]] = frozenset(
        {"bool", "int", "float", "str", "tuple[str, ...]", "tuple[int, ...]", "tuple[Any, ...]"}
        | {"Mapping[str, Any]"}
    )

    @property
    def base(self) -> str:
        """The annotation without `| None`."""
        return self.type.removesuffix(" | None")

    @property
    def optional(self) -> bool:
        return self.type.endswith(" | None")

    @property
    def option(self) -> str:
        """The long command-line name."""
        return "--" + self.name.replace("_", "-")

    def changed(self, value: Any) -> bool:
        """Whether `value` differs from what the flag has when nobody sets it."""
        return bool(value != self.default)


def flag(default: Any, help: str, **options: Any) -> Any:  # noqa: A002
    """A field of a group; options are the attributes of `Flag`."""
    spec = Flag(default=default, help=help, **options)
    if isinstance(default, dict):
        return attrs.field(factory=lambda: dict[str, Any](default), metadata={_KEY: spec})
    return attrs.field(default=default, metadata={_KEY: spec})


def equip(_cls: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """Give every field its converter and validator (attrs `field_transformer`)."""
    return [_equipped(field) for field in fields]


def _equipped(field: attrs.Attribute[Any]) -> attrs.Attribute[Any]:
    described = attrs.evolve(field.metadata[_KEY], name=field.name, type=str(field.type))
    if described.base not in Flag.TYPES and described.parse is None:
        raise TypeError(f"flag {field.name}: no way to read a value of type {described.type!r}")

    def convert(value: Any) -> Any:
        return read(described, value)

    def validate(_instance: Any, _attribute: Any, value: Any) -> None:
        check(described, value)

    return field.evolve(
        converter=convert, validator=validate, metadata={**field.metadata, _KEY: described}
    )


def flags_of(group: type) -> tuple[Flag, ...]:
    """The flags of one group class, in the order in which they are written."""
    return tuple(field.metadata[_KEY] for field in attrs.fields(group))


def read(spec: Flag, value: Any) -> Any:
    """The value in its field's type. Raises ConfigError that names the flag."""
    if spec.parse is not None:
        return _guard(spec, spec.parse, value)
    if value is None or (spec.optional and _is_none(spec, value)):
        return None
    return _guard(spec, _READERS[spec.base], value)


def _is_none(spec: Flag, value: Any) -> bool:
    """Whether a text means "not set"; a plugin may be called none, not None."""
    return isinstance(value, str) and (
        value == "None" or (value.lower() == "none" and spec.kind is None)
    )


def _guard(spec: Flag, reader: Callable[[Any], Any], value: Any) -> Any:
    try:
        return reader(value)
    except (ValueError, TypeError) as error:
        raise ConfigError(spec.name, str(error)) from error


def check(spec: Flag, value: Any) -> None:
    """Raise ConfigError for a missing value, wrong choice, bad range or a flag not to be set."""
    if value is None and not spec.optional:
        raise ConfigError(spec.name, f"needs a value; the default is {spec.default!r}")
    if spec.choices and spec.kind is None and isinstance(value, str):
        _check_choice(spec, value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        _check_range(spec, value)
    if spec.state.kind is Kind.NOT_YET and spec.changed(value):
        raise ConfigError(spec.name, f"not yet: {spec.state.reason}")
    if spec.state.kind is Kind.REFUSED and spec.changed(value):
        raise ConfigError(spec.name, f"refused: {spec.state.reason}")


def _check_choice(spec: Flag, value: str) -> None:
    if value not in spec.choices:
        known = ", ".join(spec.choices)
        raise ConfigError(spec.name, f"{value!r} is none of {known}{suggest(value, spec.choices)}")


def _check_range(spec: Flag, value: float) -> None:
    unit = f" {spec.unit}" if spec.unit else ""
    if value != value:
        raise ConfigError(spec.name, "is not a number")
    if spec.least is not None and value < spec.least:
        raise ConfigError(spec.name, f"{value} is below the least value {spec.least}{unit}")
    if spec.most is not None and value > spec.most:
        raise ConfigError(spec.name, f"{value} is above the largest value {spec.most}{unit}")


def suggest(word: str, known: tuple[str, ...] | list[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no known word is close."""
    close = get_close_matches(word, known, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


_SUFFIXES = {
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
_HUMAN = re.compile(r"([+-]?\d+(?:\.\d+)?)([kmgtKMGT]?)")


def parse_int(value: Any) -> int:
    """`25.6k` -> 25600, `1K` -> 1024, 8 -> 8; lower case is decimal, upper case binary."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{value!r} is not a whole number")
    if isinstance(value, str):
        return _human(value.strip().replace("_", ""))
    if value != int(value):
        raise ValueError(f"{value!r} is not a whole number")
    return int(value)


def _human(text: str) -> int:
    match = _HUMAN.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is not a whole number (8192, 8k, 8K, 25.6k)")
    digits, suffix = match.groups()
    if "." not in digits:
        return int(digits) * _SUFFIXES.get(suffix, 1)
    if suffix in "KMGT":
        raise ValueError(f"{text!r}: a decimal point goes with k, m, g or t (powers of ten)")
    whole = float(digits) * _SUFFIXES[suffix]
    if round(whole, 6) != round(whole):
        raise ValueError(f"{text!r} is not a whole number")
    return round(whole)


_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(f"{value!r} is neither true nor false")


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{value!r} is not a number")
    try:
        return float(value)
    except ValueError as error:
        raise ValueError(f"{value!r} is not a number") from error


def _str(value: Any) -> str:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str):
        return value
    text = str(value)
    if text.startswith("torch."):  # LLM(dtype=torch.bfloat16)
        return text.removeprefix("torch.")
    if hasattr(value, "__fspath__") or (isinstance(value, int) and not isinstance(value, bool)):
        return text
    raise TypeError(f"{value!r} is not text")


def _items(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _json(value)
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(value)
    return (value,)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error}): {text[:80]}") from error


def _mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        value = _json(value)
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is not a JSON object")
    return dict(value)


def read_mapping(name: str, value: Any) -> Mapping[str, Any]:
    """A table given as a mapping or as JSON. Raises ConfigError that names `name`."""
    try:
        return _mapping(value)
    except (ValueError, TypeError) as error:
        raise ConfigError(name, str(error)) from error


_READERS: dict[str, Callable[[Any], Any]] = {
    "bool": _bool,
    "int": parse_int,
    "float": _float,
    "str": _str,
    "tuple[str, ...]": lambda value: tuple(_str(item) for item in _items(value)),
    "tuple[int, ...]": lambda value: tuple(parse_int(item) for item in _items(value)),
    "tuple[Any, ...]": _items,
    "Mapping[str, Any]": _mapping,
}
