"""What is installed of FlashAttention: version 3 is a module of its own, for Hopper chips.

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
    """version: 2 or 3. varlen: `flash_attn_varlen_func`, which only version 2 gives pages to;
    with_cache: `flash_attn_with_kvcache`. softcap: whether they know of it (from 2.6 on).
    """

    version: int
    varlen: Callable[..., Any]
    with_cache: Callable[..., Any]
    softcap: bool


def of_module(module: Any, version: int) -> Library:
    """The functions of an imported module. Raises AttributeError where one is missing."""
    names = inspect.signature(module.flash_attn_with_kvcache).parameters
    return Library(
        version, module.flash_attn_varlen_func, module.flash_attn_with_kvcache, "softcap" in names
    )


@cache
def installed(version: int) -> Library | str:
    """The library of this version, or why it cannot be used."""
    name = "flash_attn" if version == 2 else "flash_attn_interface"
    try:
        return of_module(import_module(name), version)
    except (ImportError, AttributeError, OSError) as error:
        return f"FlashAttention {version} is not installed ({error})"
