"""Detect the installed FlashAttention libraries. Version 3 is a separate module for Hopper GPUs.

Sources: flash_attn/flash_attn_interface.py and hopper/flash_attn_interface.py of
Dao-AILab/flash-attention (arXiv 2307.08691, 2407.08608).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from attrs import frozen

__all__ = ["Library", "installed", "of_module"]


@frozen(eq=False)
class Library:
    """The functions of one FlashAttention version.

    version: 2 or 3. varlen: `flash_attn_varlen_func`; used with a paged cache by version 2 only.
    with_cache: `flash_attn_with_kvcache`. softcap: whether they accept it (2.6 and later).
    """

    version: int
    varlen: Callable[..., Any]
    with_cache: Callable[..., Any]
    softcap: bool


def of_module(module: Any, version: int) -> Library:
    """Collect the functions of an imported module. Raises AttributeError if one is missing."""
    names = inspect.signature(module.flash_attn_with_kvcache).parameters
    return Library(
        version, module.flash_attn_varlen_func, module.flash_attn_with_kvcache, "softcap" in names
    )


@cache
def installed(version: int) -> Library | str:
    """Return the library of this version, or the reason why it cannot be used."""
    name = "flash_attn" if version == 2 else "flash_attn_interface"
    try:
        return of_module(import_module(name), version)
    except (ImportError, AttributeError, OSError) as error:
        return f"FlashAttention {version} is not installed ({error})"
