"""Structures plain data into typed values with cattrs: flags, plugin options, config.json.

Tables are read strictly: "4" is not an integer and 1 not a boolean, but integers are valid floats
and 4.0 is a valid integer. Values written by people (command line, YAML, environment) may have more
forms: `8k`, `yes`, a list as one word.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_origin

from attrs import fields

if TYPE_CHECKING:
    from cattrs import Converter

__all__ = ["Problem", "parse_int", "structure_table", "structure_written"]

T = TypeVar("T")

#: JSON has no infinities; transformers writes {"__float__": "Infinity"}.
_INFINITE = {"Infinity": math.inf, "-Infinity": -math.inf}


class Problem(ValueError):
    """Faults of a table: (path, message) of each; the path "" is the table itself."""

    def __init__(self, faults: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{path}: {text}" if path else text for path, text in faults))
        self.faults = faults


def structure_table(table: Mapping[str, Any], into: type[T], *, open_ended: bool = False) -> T:
    """Structure a table into the attrs class `into`. Raises Problem.

    open_ended: ignore unknown keys.
    """
    from cattrs import transform_error
    from cattrs.errors import BaseValidationError

    try:
        value: T = _tables(open_ended).structure(dict(table), into)
    except (BaseValidationError, ValueError, TypeError) as error:
        lines = transform_error(error, path="", format_exception=_message)
        raise Problem([_fault(line) for line in lines]) from error
    return value


def structure_written(value: Any, kind: Any) -> Any:
    """Structure a value written by a person into `kind`. Raises ValueError or TypeError."""
    return _written().structure(value, kind)


def _fault(line: str) -> tuple[str, str]:
    """Split cattrs' "message @ .path" into path and message; errors of classes have no path."""
    message, _, path = line.rpartition(" @ ")
    return (path.lstrip("."), message) if message else ("", line)


def _message(error: BaseException, kind: type | None) -> str:
    from cattrs.errors import ForbiddenExtraKeysError

    if isinstance(error, ForbiddenExtraKeysError):
        known = ", ".join(field.name for field in fields(error.cl))
        return f"unknown option {', '.join(sorted(error.extra_fields))}; there are {known}"
    if isinstance(error, KeyError):
        return "is required"
    return str(error.args[0]) if error.args else type(error).__name__


@cache
def _tables(open_ended: bool) -> Converter:
    from cattrs import Converter

    converter = Converter(forbid_extra_keys=not open_ended)
    for kind in (int, float, bool, str):
        converter.register_structure_hook(kind, _exact)
    return converter


def _exact(value: Any, kind: type) -> Any:
    """A scalar that is of the type already."""
    if kind is float and isinstance(value, dict):
        value = _INFINITE.get(str(value.get("__float__")), value)
    accepted = (int, float) if kind is float else kind
    whole = kind is int and isinstance(value, float) and value.is_integer()
    if isinstance(value, float) and math.isnan(value):
        raise ValueError("NaN is not a number")
    if not (whole or isinstance(value, accepted)) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{value!r} is not of type {kind.__name__}")
    return kind(value)


@cache
def _written() -> Converter:
    converter = _tables(False).copy()
    scalars: dict[type, Callable[[Any], Any]] = {
        bool: _bool, int: parse_int, float: _float, str: _str,
    }  # fmt: skip
    for kind, reader in scalars.items():
        converter.register_structure_hook(kind, _reading(reader))
    converter.register_structure_hook_func(
        lambda kind: _origin(kind) is tuple,
        lambda value, kind: tuple(
            converter.structure(item, kind.__args__[0]) for item in _items(value)
        ),
    )
    converter.register_structure_hook_func(
        lambda kind: _origin(kind) is Mapping, _reading(_mapping)
    )
    return converter


def _reading(reader: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda value, _: reader(value)


def _origin(kind: Any) -> Any:
    return get_origin(kind)


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
        raise ValueError(f"{text!r}: a decimal point requires k, m, g or t (powers of ten)")
    whole = float(digits) * _SUFFIXES[suffix]
    if round(whole, 6) != round(whole):
        raise ValueError(f"{text!r} is not a whole number")
    return round(whole)


_BOOLEANS = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(
    ("false", "0", "no", "off"), False
)


def _bool(value: Any) -> bool:
    flag = _BOOLEANS.get(str(value).lower())
    if flag is None:
        raise ValueError(f"{value!r} must be true or false")
    return flag


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
    return tuple(value) if isinstance(value, list | tuple | set | frozenset) else (value,)


def _mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        value = _json(value)
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is not a JSON object")
    return dict(value)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error}): {text[:80]}") from error
