"""What an isolated package may use, as its manifest (`modulm.toml`) states."""

from __future__ import annotations

import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attrs import frozen

from modulm.errors import ConfigError
from modulm_isolation.terms import parse_size

__all__ = ["Needs", "needs_of"]


@frozen
class Needs:
    """network, subprocesses: whether it may use them. files: folders that it may write to. memory:
    bytes that its process may allocate, or None.
    """

    network: bool = False
    subprocesses: bool = False
    files: tuple[str, ...] = ()
    memory: int | None = None


def needs_of(target: str) -> Needs:
    """Read the manifest of the package in "package.module:attribute", which is not imported.

    Raises ConfigError naming the file.
    """
    top = target.partition(":")[0].partition(".")[0]
    spec = find_spec(top)
    origin = None if spec is None or not spec.submodule_search_locations else spec.origin
    path = None if origin is None else Path(origin).with_name("modulm.toml")
    if path is None or not path.is_file():
        return Needs()
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        needs = table.get("needs", {})
        memory = table.get("memory") or None
        return Needs(
            bool(needs.get("network")),
            bool(needs.get("subprocesses")),
            tuple(map(str, needs.get("files", ()))),
            None if memory is None else parse_size(str(memory)),
        )
    except (ValueError, AttributeError, OSError) as error:
        raise ConfigError("isolate", f"{path} is not valid: {error}") from error
