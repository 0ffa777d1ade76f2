"""Frames between processes, and configurations, plugins and errors as plain values.

A frame is a length (four bytes, big-endian) and a msgpack array whose first item is its kind.
numpy arrays are sent as raw bytes.
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

#: Maximum size of a frame in bytes, to limit what the receiver allocates.
LIMIT = 1 << 30


def pack(*frame: Any) -> bytes:
    """Pack a frame, including its length. Raises TypeError for values that are not plain."""
    body = encode(frame)
    return len(body).to_bytes(4, "big") + body


def unpack(body: bytes | bytearray) -> list[Any]:
    """Unpack a frame. body: without its length."""
    frame: list[Any] = decode(body)
    return frame


def pack_error(error: BaseException | None) -> list[Any] | None:
    """Pack an error with its class name; other exceptions than ModulmError become EngineError."""
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
    """Pack the flags that differ from their defaults. Raises EngineError for classes as values."""
    flags = config.changed()
    try:
        encode(flags)
    except TypeError as error:
        raise EngineError(
            f"a flag contains an object that cannot be sent to the engine process ({error}); "
            "name it "
            "by its path, or use --disable-frontend-multiprocessing"
        ) from error
    return flags


def unpack_config(flags: Mapping[str, Any]) -> EngineConfig:
    return configuration.EngineConfig().with_parts(flags)


def unpack_description(table: Mapping[str, Any]) -> ModelDescription:
    """Create a description from its fields as plain values."""
    decisions = tuple(
        Decision(
            **{**decision, "candidates": tuple(Verdict(**one) for one in decision["candidates"])}
        )
        for decision in table["decisions"]
    )
    return ModelDescription(**{**table, "tasks": tuple(table["tasks"]), "decisions": decisions})


def pack_plugins(plugins: PluginSet) -> list[Any]:
    """Pack a plugin set for `PluginManager.replay`."""
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
