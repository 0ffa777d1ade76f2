"""What speculators are written with, the flags that choose one, and how much it drafts.

Names are loaded on first use: the flags are read by every command, and need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modulm_speculation.speculator import Options, Speculator
    from modulm_speculation.target import Target

__all__ = ["Options", "Speculator", "Target"]

_HOMES = {"Options": "speculator", "Speculator": "speculator", "Target": "target"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
