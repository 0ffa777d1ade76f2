"""Speculative decoding: base classes of speculators, flags, draft lengths, the step part.

Names are imported on first use: every command reads the flags, which do not need torch.
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
