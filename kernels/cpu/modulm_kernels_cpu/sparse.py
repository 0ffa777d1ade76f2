"""Sparse attention over latent caches: selecting tokens, and attention over selected tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modulm_kernels_cpu.attention import cache_arguments, need_heads
from modulm_kernels_cpu.check import contiguous, dtype_code, need, shape
from modulm_kernels_cpu.library import Library

__all__ = ["sparse_ops"]


def sparse_ops(library: Library) -> dict[str, Callable[..., Any]]:
    """Return the ops of this module for one level."""
    return {
        "pick_tokens": _pick_tokens(library),
        "selected_attention": _selected_attention(library),
    }


def _rows(
    block_tables: Tensor, query_starts: Tensor, context_lens: Tensor
) -> tuple[int, int, int, int, int]:
    """Return the C arguments that locate the step's tokens."""
    sequences = context_lens.shape[0]
    need(
        block_tables.dim() == 2 and block_tables.shape[0] == sequences,
        f"block_tables must be [{sequences}, blocks], not {list(block_tables.shape)}",
    )
    need(
        block_tables.dtype == torch.int32 and block_tables.stride(1) == 1,
        "block_tables must be int32 with dense rows",
    )
    contiguous("query_starts", query_starts, torch.int32)
    shape("query_starts", query_starts, sequences + 1)
    contiguous("context_lens", context_lens, torch.int32)
    return (
        block_tables.data_ptr(), block_tables.stride(0), query_starts.data_ptr(),
        context_lens.data_ptr(), sequences,
    )  # fmt: skip


def _pick_tokens(library: Library) -> Callable[..., Tensor]:
    call = library.call("pick_tokens", "pnnnnipnnnniipnppnfpnp")

    def pick_tokens(
        q: Tensor,
        cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        scale: float,
        head_weights: Tensor,
        out: Tensor,
    ) -> Tensor:
        """Fill `out` [tokens, 1, picks] int32 with the positions that each query selects.

        See `AttentionSpec.picks`. The cache is a latent one, see `cache_shape`.
        """
        need_heads("q", q)
        tokens, heads, size = q.shape
        shape("out", out, tokens, 1, out.shape[-1])
        contiguous("out", out, torch.int32)
        shape("head_weights", head_weights, tokens, heads)
        contiguous("head_weights", head_weights, torch.float32)
        call(
            q.data_ptr(), q.stride(0), q.stride(1), heads, size, dtype_code("q", q),
            *cache_arguments(cache, 1, size, size),
            *_rows(block_tables, query_starts, context_lens), scale, head_weights.data_ptr(),
            out.shape[-1], out.data_ptr(),
        )  # fmt: skip
        return out

    return pick_tokens


def _selected_attention(library: Library) -> Callable[..., Tensor]:
    call = library.call("selected_attention", "pnnnnnipnnnniipnppnffppnp")

    def selected_attention(
        q: Tensor,
        cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        scale: float,
        selected: Tensor,
        out: Tensor,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend to the positions `selected` [tokens, 1, n] int32 of each query's row.

        Those after the query and -1 are ignored; all others must differ. The cache is latent.
        """
        need_heads("q", q)
        tokens, heads, size = q.shape
        value_size = out.shape[-1]
        shape("out", out, tokens, heads, value_size)
        contiguous("out", out, q.dtype)
        shape("selected", selected, tokens, 1, selected.shape[-1])
        contiguous("selected", selected, torch.int32)
        if sinks is not None:
            shape("sinks", sinks, heads)
            contiguous("sinks", sinks, torch.float32)
        call(
            q.data_ptr(), q.stride(0), q.stride(1), heads, size, value_size, dtype_code("q", q),
            *cache_arguments(cache, 1, size, value_size),
            *_rows(block_tables, query_starts, context_lens), scale, softcap,
            None if sinks is None else sinks.data_ptr(), selected.data_ptr(), selected.shape[-1],
            out.data_ptr(),
        )  # fmt: skip
        return out

    return selected_attention
