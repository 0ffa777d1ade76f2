"""Frames between processes: msgpack, no pickle; configurations, plugins and errors as plain values.

A frame is four bytes of length (big-endian) and a msgpack array whose first item names it. Arrays
travel as raw bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

import modulm.errors
from modulm import config as configuration
from modulm.contracts.config import EngineConfig
from modulm.contracts.decision import Decision, Verdict
from modulm.contracts.executor import ModelDescription
from modulm.errors import EngineError, ModulmError, RequestError
from modulm.plugins.declaration import Declaration
from modulm.plugins.manager import PluginSet
from modulm.plugins.selection import Selection
from modulm_wire.packing import decode, encode

__all__ = [
    "LIMIT",
    "pack",
    "pack_config",
    "pack_error",
    "pack_plugins",
    "unpack",
    "unpack_config",
    "unpack_description",
    "unpack_error",
    "unpack_plugins",
]

#: Bytes that a frame may have: nobody makes the other side allocate more.
LIMIT = 1 << 30


def pack(*frame: Any) -> bytes:
    """A frame as bytes, with its length in front. Raises TypeError for what is not plain."""
    body = encode(frame)
    return len(body).to_bytes(4, "big") + body


def unpack(body: bytes | bytearray) -> list[Any]:
    """The frame in `body`, which comes without its length."""
    frame: list[Any] = decode(body)
    return frame


def pack_error(error: BaseException | None) -> list[Any] | None:
    """An error by its class's name; one that is not ours becomes an EngineError."""
    if error is None:
        return None
    if isinstance(error, modulm.errors.ConfigError):
        return ["ConfigError", error.field, error.message]
    if isinstance(error, RequestError):
        return [type(error).__name__, error.message, error.param]
    name = type(error).__name__
    if isinstance(error, ModulmError):
        return [name, str(error)]
    return ["EngineError", f"{name}: {error}"]


def unpack_error(packed: list[Any] | None) -> ModulmError | None:
    if packed is None:
        return None
    name, *arguments = packed
    known = name if name in modulm.errors.__all__ else "EngineError"
    error: ModulmError = vars(modulm.errors)[known](*arguments)
    return error


def pack_config(config: EngineConfig) -> dict[str, Any]:
    """The flags that differ from their defaults. Raises EngineError for a class among them."""
    flags = config.changed()
    try:
        encode(flags)
    except TypeError as error:
        raise EngineError(
            f"a flag holds an object that an engine process cannot be given ({error}); name it "
            "by its path, or use --disable-frontend-multiprocessing"
        ) from error
    return flags


def unpack_config(flags: Mapping[str, Any]) -> EngineConfig:
    return configuration.EngineConfig().with_parts(flags)


def unpack_description(table: Mapping[str, Any]) -> ModelDescription:
    """From its fields as plain values."""
    decisions = tuple(
        Decision(**{**found, "candidates": tuple(Verdict(**one) for one in found["candidates"])})
        for found in table["decisions"]
    )
    return ModelDescription(**{**table, "tasks": tuple(table["tasks"]), "decisions": decisions})


def pack_plugins(plugins: PluginSet) -> list[Any]:
    """What `PluginManager.replay` needs."""
    registered = [attrs.asdict(declared, recurse=False) for declared in plugins.registered]
    modules, files, path = plugins.hook_modules, plugins.files, plugins.path
    return [str(plugins.selection), list(plugins.installed), registered, modules, files, path]


def unpack_plugins(packed: list[Any]) -> PluginSet:
    selection, installed, registered, *places = packed
    for table in registered:
        table["api"] = tuple(table["api"]) if isinstance(table["api"], list) else table["api"]
    return PluginSet(
        Selection.parse(selection),
        frozenset(tuple(entry) for entry in installed),
        tuple(Declaration(**table) for table in registered),
        *map(tuple, places),
    )
