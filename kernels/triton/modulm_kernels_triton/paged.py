"""Interface for the attention backend `triton`: cache, cache writes, attention, selections."""

from __future__ import annotations

from modulm_kernels_triton.cache import CODES, KEPT, CacheForm
from modulm_kernels_triton.device import target
from modulm_kernels_triton.paged_attention import (
    FEW,
    Look,
    Work,
    paged_attention,
    queries_of_a_tile,
)
from modulm_kernels_triton.pick_tokens import SparseWork, pick_tokens
from modulm_kernels_triton.qkv_prepare import qkv_prepare
from modulm_kernels_triton.selected_attention import selected_attention
from modulm_kernels_triton.write_kv import write_kv

__all__ = [
    "CODES",
    "FEW",
    "KEPT",
    "CacheForm",
    "Look",
    "SparseWork",
    "Work",
    "paged_attention",
    "pick_tokens",
    "qkv_prepare",
    "queries_of_a_tile",
    "selected_attention",
    "unreadable",
    "write_kv",
]

#: Lowest compute capability that converts from e4m3.
_E4M3_SINCE = 89


def unreadable(kv_dtype: str) -> str | None:
    """Return the reason why the device cannot read a cache of this format, or None."""
    backend, architecture = target()
    if kv_dtype == "float8_e4m3fn" and backend == "cuda" and int(architecture) < _E4M3_SINCE:
        return f"this GPU does not support e4m3; compute capability {_E4M3_SINCE / 10} does"
    return None
