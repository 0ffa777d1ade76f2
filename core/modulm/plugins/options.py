"""A plugin's own options: an open table, structured into its attrs class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

from attrs import fields

from modulm.errors import ConfigError

__all__ = ["exact_converter", "structure"]

T = TypeVar("T")


def structure(table: Mapping[str, Any], into: type[T], path: str) -> T:
    """The table as a value of the attrs class `into`.

    Values are not converted: "4" is no integer and 1 is no boolean; only an integer may stand for
    a float. Raises ConfigError with the path of the first unknown, missing or ill-typed key;
    `path` is where the table itself stands ("attention.foo").
    """
    from cattrs import transform_error
    from cattrs.errors import BaseValidationError

    try:
        value: T = _converter().structure(dict(table), into)
    except BaseValidationError as error:
        first, *_ = transform_error(error, path, _describe)
        message, _, field = first.rpartition(" @ ")
        raise ConfigError(field or path, message or first) from error
    return value


def _describe(error: BaseException, expected: type | None) -> str:
    from cattrs.errors import ForbiddenExtraKeysError
    from cattrs.v import format_exception

    if isinstance(error, ForbiddenExtraKeysError):
        known = ", ".join(a.name for a in fields(error.cl))
        return f"unknown option {', '.join(sorted(error.extra_fields))}; there are {known}"
    if isinstance(error, ValueError) and error.args:  # ours, or a validator's
        return str(error.args[0])
    return format_exception(error, expected)


def exact_converter(read: Callable[[Any, type], Any] | None = None, **settings: Any) -> Any:
    """A cattrs converter that takes values of the right type only, after `read` has seen them.

    "4" is no integer and 1 no boolean; only an integer may stand for a float.
    """
    from cattrs import Converter

    def exact(accepted: tuple[type, ...]) -> Any:
        def check(value: Any, target: type) -> Any:
            value = value if read is None else read(value, target)
            if not isinstance(value, accepted) or (isinstance(value, bool) and target is not bool):
                raise ValueError(f"{value!r} is not of type {target.__name__}")
            return target(value)

        return check

    converter = Converter(**settings)
    for kind, accepted in ((int, (int,)), (float, (int, float)), (bool, (bool,)), (str, (str,))):
        converter.register_structure_hook(kind, exact(accepted))
    return converter


@cache
def _converter() -> Any:
    return exact_converter(forbid_extra_keys=True)
