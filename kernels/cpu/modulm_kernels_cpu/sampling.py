"""Sampling. Semantics are those of the twins in `modulm.ops.sampling_twins`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modulm_kernels_cpu.check import contiguous, dense_rows, dtype_code, need, shape
from modulm_kernels_cpu.library import Library

__all__ = ["sampling_ops"]


def sampling_ops(library: Library) -> dict[str, Callable[..., Any]]:
    """Return the ops of this module for one level."""
    return {
        "argmax": _argmax(library),
        "sample": _sample(library),
        "apply_penalties": _apply_penalties(library),
        "apply_bitmask": _apply_bitmask(library),
        "top_logprobs": _top_logprobs(library),
    }


def _argmax(library: Library) -> Callable[[Tensor], Tensor]:
    call = library.call("argmax", "pnnnip")

    def argmax(logits: Tensor) -> Tensor:
        stride = dense_rows("logits", logits)
        rows, size = logits.shape
        need(size > 0, "logits must have a vocabulary")
        out = torch.empty(rows, dtype=torch.int64)
        call(logits.data_ptr(), stride, rows, size, dtype_code("logits", logits), out.data_ptr())
        return out

    return argmax


def _sample(library: Library) -> Callable[..., Tensor]:
    call = library.call("sample", "pnnnpppppp")

    def sample(
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        uniform: Tensor,
    ) -> Tensor:
        stride = _fp32_rows(logits)
        rows, size = logits.shape
        need(size > 0, "logits must have a vocabulary")
        for name, x, dtype in (
            ("temperature", temperature, torch.float32),
            ("top_k", top_k, torch.int32),
            ("top_p", top_p, torch.float32),
            ("min_p", min_p, torch.float32),
            ("uniform", uniform, torch.float64),
        ):
            shape(name, x, rows)
            contiguous(name, x, dtype)
        out = torch.empty(rows, dtype=torch.int64)
        call(
            logits.data_ptr(), stride, rows, size, temperature.data_ptr(), top_k.data_ptr(),
            top_p.data_ptr(), min_p.data_ptr(), uniform.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    return sample


def _apply_penalties(library: Library) -> Callable[..., None]:
    call = library.call("penalties", "pnnpppppp")

    def apply_penalties(
        logits: Tensor,
        indices: Tensor,
        ids: Tensor,
        counts: Tensor,
        repetition: Tensor,
        frequency: Tensor,
        presence: Tensor,
    ) -> None:
        stride = _fp32_rows(logits)
        size = indices.shape[0]
        arguments = (
            ("indices", indices, torch.int64),
            ("ids", ids, torch.int64),
            ("counts", counts, torch.float32),
            ("repetition", repetition, torch.float32),
            ("frequency", frequency, torch.float32),
            ("presence", presence, torch.float32),
        )
        for name, x, dtype in arguments:
            shape(name, x, size)
            contiguous(name, x, dtype)
        _inside("indices", indices, logits.shape[0])
        _inside("ids", ids, logits.shape[1])
        call(logits.data_ptr(), stride, size, *(x.data_ptr() for _, x, _ in arguments))

    return apply_penalties


def _apply_bitmask(library: Library) -> Callable[[Tensor, Tensor, Tensor], None]:
    call = library.call("bitmask", "pnnnppn")

    def apply_bitmask(logits: Tensor, indices: Tensor, mask: Tensor) -> None:
        stride = _fp32_rows(logits)
        size = logits.shape[1]
        contiguous("indices", indices, torch.int64)
        contiguous("mask", mask, torch.int32)
        need(
            mask.dim() == 2 and len(mask) == len(indices) and mask.shape[1] * 32 >= size,
            f"mask must be [{len(indices)}, {-(-size // 32)}], not {list(mask.shape)}",
        )
        _inside("indices", indices, logits.shape[0])
        call(
            logits.data_ptr(), stride, size, len(indices), indices.data_ptr(), mask.data_ptr(),
            mask.shape[1],
        )  # fmt: skip

    return apply_bitmask


def _top_logprobs(library: Library) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    call = library.call("top_logprobs", "pnnnpnippp")

    def top_logprobs(
        values: Tensor, chosen: Tensor, k: int, normalise: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        stride = _fp32_rows(values)
        rows, size = values.shape
        shape("chosen", chosen, rows)
        contiguous("chosen", chosen, torch.int64)
        _inside("chosen", chosen, size)
        k = min(k, size)
        ids = torch.empty(rows, 1 + k, dtype=torch.int64)
        best = torch.empty(rows, 1 + k, dtype=torch.float32)
        rank = torch.empty(rows, dtype=torch.int64)
        call(
            values.data_ptr(), stride, rows, size, chosen.data_ptr(), k, int(normalise),
            ids.data_ptr(), best.data_ptr(), rank.data_ptr(),
        )  # fmt: skip
        return ids, best, rank

    return top_logprobs


def _fp32_rows(logits: Tensor) -> int:
    """Return the row stride of logits [rows, vocabulary] fp32."""
    need(logits.dtype == torch.float32, f"logits must be float32, not {str(logits.dtype)[6:]}")
    return dense_rows("logits", logits)


def _inside(name: str, indices: Tensor, size: int) -> None:
    if indices.numel():
        low, high = indices.aminmax()
        need(int(low) >= 0 and int(high) < size, f"{name} must lie in [0, {size})")
