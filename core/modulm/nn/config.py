"""Reads a checkpoint's config.json into the config class of its model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import attrs

from modulm.errors import CheckpointError
from modulm.structure import structure_table

__all__ = ["model_keys", "read_config"]

T = TypeVar("T")

#: Upper bounds of numbers: for keys with this suffix, and for all others.
_MOST = {"layers": 4096, "experts": 2**16}
_MOST_OF_ALL = 2**40
_LARGEST = 1e30


def read_config(table: Mapping[str, Any], into: type[T], file: str = "config.json") -> T:
    """Structure config.json into a model's config class.

    Numbers are not converted from strings. A missing key gets the default of the model type
    (`model_keys` of the class's package), else the class's. null means False for booleans, else the
    class's default. A class may define `ALIASES`, alternative names of keys, or a method
    `from_table` that reads the table. Raises CheckpointError naming the file and the key.
    """
    reader: Callable[[Mapping[str, Any], str], T] | None = getattr(into, "from_table", None)
    if reader is not None:
        return reader(table, file)
    by_type = model_keys(into.__module__.partition(".")[0]).get(str(table.get("model_type")), {})
    known = {key: value for key, value in table.items() if key not in by_type.get("unknown", ())}
    aliases: Mapping[str, str] = getattr(into, "ALIASES", {})
    named = {
        aliases.get(key, key): value
        for keys in (by_type.get("defaults", {}), known)
        for key, value in keys.items()
    }
    described: Any = into
    kinds = {attribute.name: attribute.type for attribute in attrs.fields(described)}
    for key in [key for key, value in named.items() if value is None]:
        del named[key]
        if kinds.get(key) in (bool, "bool"):
            named[key] = False
    try:
        for key in kinds:
            _check_number(key, named.get(key))
        if known.get("per_layer_config") and "per_layer_config" not in kinds:
            raise ValueError("per_layer_config: different keys per layer: not supported yet")
        return structure_table(named, into, open_ended=True)
    except ValueError as problem:
        written = _as_written(str(problem), aliases, table)
        raise CheckpointError(f"{file}: {written}") from problem


@cache
def model_keys(package: str) -> Mapping[str, Any]:
    """Read a package's keys.json: for each model type, `defaults` of missing keys, and `unknown`
    keys that are ignored.
    """
    spec = getattr(sys.modules.get(package), "__spec__", None)
    if spec is None or spec.submodule_search_locations is None:  # a script, a notebook, one module
        return {}
    file = resources.files(package) / "keys.json"
    keys: Mapping[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return keys


def _check_number(key: str, value: Any) -> None:
    """Raise ValueError for an implausible number."""
    if isinstance(value, dict):
        for inner, item in value.items():
            _check_number(f"{key}.{inner}", item)
    elif isinstance(value, list) and any(item != item for item in value):
        raise ValueError(f"{key}: NaN is not a number")
    elif isinstance(value, int | float):
        most = next((n for ending, n in _MOST.items() if key.endswith(ending)), _MOST_OF_ALL)
        whole, least = isinstance(value, int), -_LARGEST * key.endswith("_lower_bound")
        if not (-1 if whole else least) <= value <= (most if whole else _LARGEST):
            raise ValueError(f"{key}: {value} is not a plausible number for a model")


def _as_written(problem: str, aliases: Mapping[str, str], table: Mapping[str, Any]) -> str:
    """Return a problem with the key's name as in the file."""
    key, colon, message = problem.partition(":")
    own = next((own for own, common in aliases.items() if common == key and own in table), key)
    return f"{own}{colon}{message}"
