"""Renamed modules and names, so that plugins written for the last release keep working."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from modulm.plugins.index import to_install

__all__ = ["driver_name", "missing_names", "moved", "new_home", "public_name"]

_MISSING = re.compile(r"No module named '([\w.]+)'|cannot import name '(\w+)' from '([\w.]+)'")


def moved() -> dict[str, str]:
    """Return dotted names of the last release -> their current names, from `moved.txt`."""
    return _table("moved.txt")


def driver_name(kind: str, name: str) -> str:
    """Return what a driver is called here, given its name in vLLM, from `driver_names.txt`."""
    return _table("driver_names.txt").get(f"{kind}.{name}", name)


@cache
def _table(file: str) -> dict[str, str]:
    lines = Path(__file__).with_name(file).read_text(encoding="utf-8").splitlines()
    return dict(line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))


def missing_names(error: BaseException) -> list[str]:
    """Return the dotted name that a failed import lacks and the module that it was in, or [].

    The module is "" if the name is a module itself.
    """
    match = _MISSING.match(str(error)) if isinstance(error, ImportError) else None
    if match is None:
        return []
    module, name, source = match.groups()
    return [module or f"{source}.{name}", source or ""]


def new_home(error: BaseException) -> str:
    """Return the end of a message with the new location of a failed import, or ""."""
    old = next((name for name in missing_names(error) if name in moved()), None)
    return "" if old is None else f"; {old} is now {moved()[old]}"


def public_name(package: str, name: str, importer: str) -> Any:
    """Return a public name of a distribution beside the core, on behalf of module `importer`.

    Raises AttributeError if there is none, and ImportError with what to install if the
    distribution is missing.
    """
    missing = AttributeError(f"module {importer!r} has no attribute {name!r}")
    if name.startswith("__"):
        raise missing
    try:
        module = import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        distribution = package.replace("_", "-")
        raise ImportError(f"{name} needs {distribution}{to_install(distribution)}") from error
    if name not in module.__all__:
        raise missing
    return getattr(module, name)
