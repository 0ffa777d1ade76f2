"""Ops of multi-head latent attention. Semantics are those of the twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modulm_kernels_cpu.check import CODES, contiguous, dense_rows, dtype_code, need, shape
from modulm_kernels_cpu.library import Library

__all__ = ["latent_ops"]


def latent_ops(library: Library) -> dict[str, Callable[..., Any]]:
    """Return the ops of this module for one level."""
    return {"each_head": _each_head(library), "latent_prepare": _latent_prepare(library)}


def _map_heads(library: Library) -> Callable[[Tensor, Tensor, Tensor], None]:
    call = library.call("each_head", "pnnppnnnnnni")

    def map_heads(x: Tensor, weight: Tensor, out: Tensor) -> None:
        tokens, heads, inputs = x.shape
        shape("weight", weight, heads, inputs, weight.shape[-1])
        contiguous("weight", weight, x.dtype)
        need(x.stride(2) == 1 or inputs == 1, "x must have dense heads")
        call(
            x.data_ptr(), x.stride(0), x.stride(1), weight.data_ptr(), out.data_ptr(),
            out.stride(0), out.stride(1), tokens, heads, inputs, weight.shape[-1],
            dtype_code("x", x),
        )  # fmt: skip

    return map_heads


def _each_head(library: Library) -> Callable[..., Tensor]:
    map_heads = _map_heads(library)

    def each_head(x: Tensor, weight: Tensor) -> Tensor:
        out = x.new_empty(*x.shape[:2], weight.shape[-1])
        map_heads(x, weight, out)
        return out

    return each_head


def _latent_prepare(library: Library) -> Callable[..., tuple[Tensor, Tensor]]:
    map_heads = _map_heads(library)
    call = library.call("latent_rotated", "pnnpnpfppippnnnnii")

    def latent_prepare(
        q: Tensor,
        latents: Tensor,
        up: Tensor,
        weight: Tensor,
        eps: float,
        cos_sin: Tensor,
        positions: Tensor,
        neox: bool = True,
    ) -> tuple[Tensor, Tensor]:
        tokens, heads, _ = q.shape
        _, nope, rank = up.shape
        turned = cos_sin.shape[-1]
        shape("q", q, tokens, heads, nope + turned)
        shape("latents", latents, tokens, rank + turned)
        shape("weight", weight, rank)
        shape("positions", positions, tokens)
        contiguous("positions", positions, torch.int64)
        contiguous("cos_sin", cos_sin, torch.float32)
        need(latents.dtype == q.dtype, f"latents must be {q.dtype}, not {latents.dtype}")
        need(weight.dtype in (q.dtype, torch.float32), f"weight must be float32 or {q.dtype}")
        queries = q.new_empty(tokens, heads, rank + turned)
        keys = q.new_empty(tokens, 1, rank + turned)
        map_heads(q[..., :nope], up, queries)
        turning = q[..., nope:]
        call(
            turning.data_ptr(), q.stride(0), q.stride(1), latents.data_ptr(),
            dense_rows("latents", latents), weight.data_ptr(), eps, cos_sin.data_ptr(),
            positions.data_ptr(), int(neox), queries.data_ptr(), keys.data_ptr(), tokens, heads,
            rank, turned, dtype_code("q", q), CODES[weight.dtype],
        )  # fmt: skip
        return queries, keys

    return latent_prepare
