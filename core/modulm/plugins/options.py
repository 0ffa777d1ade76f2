"""Options of plugins: tables, structured into the plugin's attrs class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from modulm.errors import ConfigError
from modulm.structure import Problem, structure_table

__all__ = ["structure"]

T = TypeVar("T")


def structure(table: Mapping[str, Any], into: type[T], path: str) -> T:
    """Structure a table into the attrs class `into`.

    Values are not converted: "4" is not an integer, 1 not a boolean. path: of the table
    ("attention.foo"). Raises ConfigError with the path of the first unknown, missing or ill-typed
    key. Classes with a class variable OPEN_ENDED accept unknown keys, for tables from checkpoints.
    """
    try:
        return structure_table(table, into, open_ended="OPEN_ENDED" in vars(into))
    except Problem as problem:
        field, message = problem.faults[0]
        raise ConfigError(f"{path}.{field}" if field else path, message) from problem
