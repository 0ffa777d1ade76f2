"""`modulm.parsing.parse` and what goes with it, where callers have it: modulm-parsing holds it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        return getattr(import_module("modulm_parsing"), name)
    except ModuleNotFoundError as error:
        if error.name != "modulm_parsing":
            raise
        raise ImportError(f"{name} needs modulm-parsing: pip install modulm-parsing") from error
