"""CPU kernels of modulm: C++ behind a plain C ABI, one library per instruction set.

`ops()` returns the op table of the best level that this CPU supports, `ops(level)` that of another.
Importing this package raises LibraryMissing (an ImportError) if nothing was compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from modulm_kernels_cpu.attention import (
    CACHE_DTYPES,
    MAX_HEAD_SIZE,
    MOST_MASKED,
    attention_ops,
    cache_shape,
    copy_tokens,
)
from modulm_kernels_cpu.convolution import convolution_ops
from modulm_kernels_cpu.elementwise import elementwise_ops
from modulm_kernels_cpu.library import LEVELS, Library, LibraryMissing, levels, load, use
from modulm_kernels_cpu.linear import PackedLinear, linear_ops
from modulm_kernels_cpu.lora import lora_ops
from modulm_kernels_cpu.mla import latent_ops
from modulm_kernels_cpu.moe import PackedExperts, moe_ops
from modulm_kernels_cpu.recurrence import recurrence_ops
from modulm_kernels_cpu.sampling import sampling_ops
from modulm_kernels_cpu.sparse import sparse_ops

__all__ = [
    "CACHE_DTYPES",
    "LEVELS",
    "Library",
    "LibraryMissing",
    "MAX_HEAD_SIZE",
    "MOST_MASKED",
    "PackedExperts",
    "PackedLinear",
    "cache_shape",
    "copy_tokens",
    "levels",
    "load",
    "ops",
    "set_threads",
    "use",
]


def ops(level: str | None = None) -> Mapping[str, Callable[..., Any]]:
    """Return op name -> callable for `level` or the default; names as in the core's twins."""
    return _ops(load(level))


@cache
def _ops(library: Library) -> Mapping[str, Callable[..., Any]]:
    groups = (
        elementwise_ops,
        linear_ops,
        attention_ops,
        latent_ops,
        moe_ops,
        lora_ops,
        sampling_ops,
        recurrence_ops,
        sparse_ops,
        convolution_ops,
    )
    return MappingProxyType({name: op for group in groups for name, op in group(library).items()})


def set_threads(count: int) -> None:
    """Use `count` threads in the default level's ops; 0 for one per core of this process."""
    load().set_threads(count)


load()
