"""What the attention driver `triton` is made of: the cache, writing to it, attention over it."""

from __future__ import annotations

from modulm_kernels_triton.cache import KEPT, CacheForm
from modulm_kernels_triton.device import target
from modulm_kernels_triton.paged_attention import (
    FEW,
    Look,
    Work,
    paged_attention,
    queries_of_a_tile,
)
from modulm_kernels_triton.qkv_prepare import qkv_prepare
from modulm_kernels_triton.write_kv import write_kv

__all__ = [
    "FEW",
    "KEPT",
    "CacheForm",
    "Look",
    "Work",
    "paged_attention",
    "qkv_prepare",
    "queries_of_a_tile",
    "unreadable",
    "write_kv",
]

#: The first NVIDIA GPUs that convert from e4m3.
_E4M3_SINCE = 89


def unreadable(kv_dtype: str) -> str | None:
    """Why a cache of this format cannot be read on the device, None if it can."""
    backend, architecture = target()
    if kv_dtype == "float8_e4m3fn" and backend == "cuda" and int(architecture) < _E4M3_SINCE:
        return f"this GPU reads no e4m3: capability {_E4M3_SINCE / 10} does"
    return None
