"""Scans and delta rules over states. Shapes and meaning are those of the twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modulm_kernels_cpu.check import contiguous, need, shape
from modulm_kernels_cpu.library import Library

__all__ = ["recurrence_ops"]

_ROWS = "ppppp" + "nn"


def recurrence_ops(library: Library) -> dict[str, Callable[..., Any]]:
    """The ops of this module, bound to one level."""
    return {"selective_scan": _selective_scan(library), "delta_rule": _delta_rule(library)}


class _Rows:
    """A StatePlan as the C functions take it; holds the arrays while they run."""

    def __init__(self, plan: Any, states: Tensor) -> None:
        contiguous("states", states, torch.float32)
        self.starts = plan.query_starts.int().contiguous()
        self.slots = plan.slots.long().contiguous()
        self.sources = self.slots if plan.sources is None else plan.sources.long().contiguous()
        self.fresh = plan.fresh.to(torch.uint8).contiguous()
        self.kept = torch.tensor(sorted(plan.kept), dtype=torch.int64).view(-1, 3)
        need(
            self.starts.numel() == self.slots.numel() + 1,
            f"query_starts has {self.starts.numel()} entries for {self.slots.numel()} rows",
        )

    def arguments(self) -> tuple[int, ...]:
        """starts, sources, slots, fresh, kept, how many kept, rows."""
        arrays = (self.starts, self.sources, self.slots, self.fresh, self.kept)
        pointers = tuple(array.data_ptr() for array in arrays)
        return (*pointers, len(self.kept), self.slots.numel())


def _dense(x: Tensor) -> Tensor:
    return x.float().contiguous()


def _selective_scan(library: Library) -> Callable[..., Tensor]:
    call = library.call("selective_scan", "pppn" + "pppp" + _ROWS + "nnnn")

    def selective_scan(
        x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor, plan: Any
    ) -> Tensor:
        x, dt, a, b, c = (_dense(part) for part in (x, dt, a, b, c))
        tokens, heads, dim = x.shape
        groups, size = b.shape[1:]
        shape("dt", dt, tokens, heads)
        shape("b", b, tokens, groups, size)
        shape("c", c, tokens, groups, size)
        shape("states", states, states.shape[0], heads, dim, size)
        need(a.shape in {(heads, 1), (heads, size)}, f"a must have 1 or {size} columns")
        need(heads % groups == 0, f"{groups} groups do not divide {heads} heads")
        rows, y = _Rows(plan, states), torch.empty_like(x)
        call(
            x.data_ptr(), dt.data_ptr(), a.data_ptr(), a.shape[1], b.data_ptr(), c.data_ptr(),
            states.data_ptr(), y.data_ptr(), *rows.arguments(), heads, dim, size, groups,
        )  # fmt: skip
        return y

    return selective_scan


def _delta_rule(library: Library) -> Callable[..., Tensor]:
    call = library.call("delta_rule", "ppppppp" + _ROWS + "nnnn")

    def delta_rule(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, states: Tensor, plan: Any
    ) -> Tensor:
        q, k, v, beta, decay = (_dense(part) for part in (q, k, v, beta, decay))
        tokens, key_heads, key_dim = k.shape
        heads, value_dim = v.shape[1:]
        shape("q", q, tokens, key_heads, key_dim)
        shape("v", v, tokens, heads, value_dim)
        shape("beta", beta, tokens, heads)
        shape("decay", decay, tokens, heads)
        shape("states", states, states.shape[0], heads, key_dim, value_dim)
        need(heads % key_heads == 0, f"{key_heads} key heads do not divide {heads} heads")
        rows, y = _Rows(plan, states), torch.empty_like(v)
        call(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), beta.data_ptr(), decay.data_ptr(),
            states.data_ptr(), y.data_ptr(), *rows.arguments(),
            key_heads, heads, key_dim, value_dim,
        )  # fmt: skip
        return y

    return delta_rule
