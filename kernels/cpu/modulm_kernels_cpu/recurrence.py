"""Convolutions, scans and delta rules over recurrent states. Semantics are those of the twins."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modulm_kernels_cpu.check import CODES, contiguous, dense_rows, dtype_code, need, shape
from modulm_kernels_cpu.library import Library

__all__ = ["recurrence_ops"]

_ROWS = "ppppp" + "nn"


def recurrence_ops(library: Library) -> dict[str, Callable[..., Any]]:
    """Return the ops of this module for one level."""
    return {
        "causal_conv": _causal_conv(library),
        "delta_rule": _delta_rule(library),
        "gated_rms_norm": _gated_rms_norm(library),
        "selective_scan": _selective_scan(library),
    }


class _Rows:
    """A StatePlan as the C functions take it; keeps the arrays alive while they run."""

    def __init__(self, plan: Any, states: Tensor) -> None:
        contiguous("states", states)
        self.starts = plan.query_starts
        self.slots = plan.slots
        self.sources = self.slots if plan.sources is None else plan.sources
        self.fresh = plan.fresh.view(torch.uint8)
        contiguous("query_starts", self.starts, torch.int32)
        contiguous("slots", self.slots, torch.int64)
        contiguous("sources", self.sources, torch.int64)
        self.kept = torch.tensor(sorted(plan.kept), dtype=torch.int64) if plan.kept else None
        self.count = self.slots.numel()
        need(
            self.starts.numel() == self.count + 1,
            f"query_starts has {self.starts.numel()} entries for {self.count} rows",
        )

    def arguments(self) -> tuple[int | None, ...]:
        """Return starts, sources, slots, fresh, kept, number of kept states, rows."""
        arrays = (self.starts, self.sources, self.slots, self.fresh)
        pointers = tuple(array.data_ptr() for array in arrays)
        if self.kept is None:
            return (*pointers, None, 0, self.count)
        return (*pointers, self.kept.data_ptr(), len(self.kept), self.count)


def _wide(name: str, x: Tensor, *sizes: int) -> int:
    """Return the address of fp32 numbers."""
    shape(name, x, *sizes)
    contiguous(name, x, torch.float32)
    return x.data_ptr()


def _tokens(name: str, x: Tensor, dtype: torch.dtype, *sizes: int) -> tuple[int, int]:
    """Return address and row stride of numbers [tokens, ...], dense per token."""
    shape(name, x, *sizes)
    need(x.dtype == dtype, f"{name} must be {str(dtype)[6:]}, not {str(x.dtype)[6:]}")
    if x.dim() == 2:
        return x.data_ptr(), dense_rows(name, x)
    need(x.stride()[1:] == (x.shape[2], 1), f"{name} must be dense in each token")
    return x.data_ptr(), x.stride(0)


def _causal_conv(library: Library) -> Callable[..., Tensor]:
    call = library.call("causal_conv", "pnppipp" + _ROWS + "nni")

    def causal_conv(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        silu: bool,
        states: Tensor,
        plan: Any,
    ) -> Tensor:
        code, (tokens, channels), width = dtype_code("x", x), x.shape, weight.shape[-1]
        shape("weight", weight, channels, 1, width)
        contiguous("weight", weight, x.dtype)
        shape("states", states, states.shape[0], width - 1, channels)
        contiguous("states", states, x.dtype)
        if bias is not None:
            shape("bias", bias, channels)
            contiguous("bias", bias, x.dtype)
        rows, out = _Rows(plan, states), x.new_empty(tokens, channels)
        call(
            x.data_ptr(), dense_rows("x", x), weight.data_ptr(),
            None if bias is None else bias.data_ptr(), int(silu), states.data_ptr(),
            out.data_ptr(), *rows.arguments(), channels, width, code,
        )  # fmt: skip
        return out

    return causal_conv


def _selective_scan(library: Library) -> Callable[..., Tensor]:
    call = library.call("selective_scan", "pnpnpffpnpnpnppp" + _ROWS + "nnnni")

    def selective_scan(
        x: Tensor,
        step: Tensor,
        a_log: Tensor,
        b: Tensor,
        c: Tensor,
        skip: Tensor,
        states: Tensor,
        plan: Any,
        bias: Tensor | None = None,
        limit: tuple[float, float] = (0.0, math.inf),
    ) -> Tensor:
        code, (tokens, heads, dim) = dtype_code("x", x), x.shape
        groups, size = b.shape[1:]
        need(a_log.shape in {(heads, 1), (heads, size)}, f"a_log must have 1 or {size} columns")
        need(heads % groups == 0, f"{groups} groups do not divide {heads} heads")
        rows, y = _Rows(plan, states), x.new_empty(x.shape, dtype=torch.float32)
        call(
            *_tokens("x", x, x.dtype, tokens, heads, dim),
            *_tokens("step", step, x.dtype, tokens, heads),
            None if bias is None else _wide("bias", bias, heads),
            *limit,
            _wide("a_log", a_log, *a_log.shape), a_log.shape[1],
            *_tokens("b", b, x.dtype, tokens, groups, size),
            *_tokens("c", c, x.dtype, tokens, groups, size),
            _wide("skip", skip, heads),
            _wide("states", states, states.shape[0], heads, dim, size),
            y.data_ptr(), *rows.arguments(), heads, dim, size, groups, code,
        )  # fmt: skip
        return y

    return selective_scan


def _delta_rule(library: Library) -> Callable[..., Tensor]:
    call = library.call("delta_rule", "pn" * 5 + "ppfpp" + _ROWS + "nnnni")

    def delta_rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        step: Tensor,
        a_log: Tensor,
        bias: Tensor,
        states: Tensor,
        plan: Any,
        reach: float = 1.0,
    ) -> Tensor:
        code, (tokens, key_heads, key_dim) = dtype_code("k", k), k.shape
        heads, value_dim = v.shape[1:]
        need(heads % key_heads == 0, f"{key_heads} key heads do not divide {heads} heads")
        rows, y = _Rows(plan, states), v.new_empty(v.shape, dtype=torch.float32)
        call(
            *_tokens("q", q, k.dtype, tokens, key_heads, key_dim),
            *_tokens("k", k, k.dtype, tokens, key_heads, key_dim),
            *_tokens("v", v, k.dtype, tokens, heads, value_dim),
            *_tokens("beta", beta, k.dtype, tokens, heads),
            *_tokens("step", step, k.dtype, tokens, heads),
            _wide("a_log", a_log, heads), _wide("bias", bias, heads), reach,
            _wide("states", states, states.shape[0], heads, key_dim, value_dim),
            y.data_ptr(), *rows.arguments(), key_heads, heads, key_dim, value_dim, code,
        )  # fmt: skip
        return y

    return delta_rule


def _gated_rms_norm(library: Library) -> Callable[..., Tensor]:
    call = library.call("gated_rms_norm", "ppnpnfipnnnii")

    def gated_rms_norm(
        x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, *, norm_first: bool
    ) -> Tensor:
        code, (tokens, width) = dtype_code("gate", gate), gate.shape
        need(width % groups == 0, f"{groups} groups do not divide {width} columns")
        size = width // groups
        need(weight.shape in {(width,), (size,)}, f"weight must be [{width}] or [{size}]")
        contiguous("weight", weight)
        need(weight.dtype in (gate.dtype, torch.float32), "weight must be float32 or the gate's")
        out = gate.new_empty(tokens, width)
        call(
            _wide("x", x, tokens, width), gate.data_ptr(), dense_rows("gate", gate),
            weight.data_ptr(), weight.numel() // size, eps, int(norm_first), out.data_ptr(),
            tokens, groups, size, code, CODES[weight.dtype],
        )  # fmt: skip
        return out

    return gated_rms_norm
