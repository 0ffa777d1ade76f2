"""`modulm.parsing.parse` and what goes with it, where callers have it: modulm-parsing holds it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["parse"]

parse: Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        package = import_module("modulm_parsing")
    except ModuleNotFoundError as error:
        if error.name != "modulm_parsing":
            raise
        raise ImportError(f"{name} needs modulm-parsing: pip install modulm-parsing") from error
    if name not in package.__all__:
        raise AttributeError(f"module 'modulm.parsing' has no attribute {name!r}")
    return getattr(package, name)
