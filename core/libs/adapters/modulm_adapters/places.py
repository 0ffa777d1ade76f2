"""Adapters named by flags, and the folders that their files must be in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from attrs import frozen

from modulm.errors import CheckpointError, ConfigError

__all__ = ["LoRAModule", "inside", "name_fault", "read_modules"]

#: Maximum length of an adapter's name.
_LONGEST = 256
_KEYS = {"name", "path", "base_model_name"}


@frozen
class LoRAModule:
    """One entry of `--lora-modules`. parent: its base model, as shown to clients."""

    name: str
    path: str
    parent: str | None = None


def read_modules(entries: Iterable[str]) -> tuple[LoRAModule, ...]:
    """Parse `name=path`, or JSON with name, path and base_model_name. Raises ConfigError."""
    modules = tuple(map(_module, entries))
    names = [module.name for module in modules]
    for name in names:
        if (fault := name_fault(name)) is not None:
            raise ConfigError("lora_modules", f"{name!r:.80}: the name {fault}")
        if names.count(name) > 1:
            raise ConfigError("lora_modules", f"{name!r} occurs twice")
    return modules


def name_fault(name: str) -> str | None:
    """Return why a name is not safe for requests, logs and paths; None if it is."""
    if not 0 < len(name) <= _LONGEST or not name.isprintable():
        return f"must have 1 to {_LONGEST} printable characters"
    if name != name.strip() or ".." in name.replace("\\", "/").split("/"):
        return "must not start or end with a space, or have a part '..'"
    return None


def _module(entry: str) -> LoRAModule:
    if not entry.lstrip().startswith("{"):
        name, separator, path = entry.partition("=")
        if not (name and separator and path):
            raise ConfigError("lora_modules", f"{entry!r} is neither name=path nor JSON")
        return LoRAModule(name, path)
    try:
        table = json.loads(entry)
    except ValueError as error:
        raise ConfigError("lora_modules", f"{entry!r} is not valid JSON: {error}") from error
    texts = all(isinstance(value, str) and value for value in table.values())
    if not texts or not {"name", "path"} <= table.keys() <= _KEYS:
        raise ConfigError(
            "lora_modules",
            f"{entry!r}: name and path are required, base_model_name is optional; all are strings",
        )
    return LoRAModule(table["name"], table["path"], table.get("base_model_name"))


def inside(path: Path, folders: Sequence[Path]) -> Path:
    """Resolve `path` and check that it and all its files are inside one of `folders`.

    Links are followed first. Raises CheckpointError, which does not reveal whether a path outside
    exists.
    """
    try:
        allowed = [folder.resolve() for folder in folders]
        target = path.resolve()
        several = (target.parent / "adapter_config.json").is_file()
        files = target.parent if several and not target.is_dir() else target
        if not all(any(one.is_relative_to(a) for a in allowed) for one in (target, files)):
            raise CheckpointError(f"{path} is outside the folders that adapters may be loaded from")
        if not files.is_dir():
            raise CheckpointError(f"{path} is not a folder")
        for file in files.iterdir():
            if not any(file.resolve().is_relative_to(folder) for folder in allowed):
                raise CheckpointError(
                    f"{path}: {file.name} leads outside the folders that adapters may be "
                    "loaded from"
                )
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a byte of 0
        raise CheckpointError(f"{str(path)!r} cannot be resolved: {error}") from error
    return target
