"""Recurrences on one prompt and on decoding rows: token by token in torch, twin, kernel.

python bench/states.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import modulm_kernels_cpu
from modulm.contracts.model import StatePlan
from modulm_layers import recurrence

PROMPT = 1024
ROWS = 16


def plan_of(counts: list[int]) -> StatePlan:
    """A plan of new rows with these token counts."""
    return StatePlan(
        slots=torch.arange(1, len(counts) + 1),
        fresh=torch.ones(len(counts), dtype=torch.bool),
        query_starts=torch.tensor([0, *counts]).cumsum(0).int(),
        counts=tuple(counts),
        starts=(0,) * len(counts),
    )


def scan(tokens: int, heads: int, dim: int, size: int, paces: int) -> tuple[Any, ...]:
    """Inputs of a selective scan."""
    return (
        torch.randn(tokens, heads, dim),
        torch.rand(tokens, heads) * 0.1,
        -torch.rand(heads, paces) * 8,
        torch.randn(tokens, 1, size),
        torch.randn(tokens, 1, size),
    )


def delta(tokens: int, heads: int, key_heads: int, size: int) -> tuple[Any, ...]:
    """Inputs of a delta rule."""
    return (
        torch.randn(tokens, key_heads, size),
        torch.nn.functional.normalize(torch.randn(tokens, key_heads, size), dim=-1),
        torch.randn(tokens, heads, size),
        torch.rand(tokens, heads),
        -torch.rand(tokens, heads),
    )


SHAPES = {
    "Mamba 130M: 1536 channels, 16": (
        "selective_scan", lambda n: scan(n, 1536, 1, 16, 16), (1536, 1, 16), (2,)
    ),
    "Mamba 2 130M: 24 heads of 64, 128": (
        "selective_scan", lambda n: scan(n, 24, 64, 128, 1), (24, 64, 128), (2,)
    ),
    "Qwen3-Next: 32 heads, 128 x 128": (
        "delta_rule", lambda n: delta(n, 32, 16, 128), (32, 128, 128), ()
    ),
}  # fmt: skip


def best(run: Callable[[], Any], seconds: float = 0.6) -> float:
    """The shortest run, in seconds."""
    run()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 2 or time.perf_counter() < until:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def measure(op: str, make: Callable[[int], Any], shape: Any, fixed: Any) -> list[float]:
    """Microseconds per token of a prompt (loop, twin, kernel) and per step (twin, kernel)."""
    states = torch.zeros(ROWS + 1, *shape)
    ops = recurrence.__dict__[op], modulm_kernels_cpu.ops()[op]
    inputs, step = make(PROMPT), make(ROWS)
    whole, one, rows = plan_of([PROMPT]), plan_of([1]), plan_of([1] * ROWS)

    def loop() -> None:
        for t in range(64):
            token = (x if i in fixed else x[t : t + 1] for i, x in enumerate(inputs))
            ops[0](*token, states, one)

    found = [best(loop) / 64]
    found += [best(partial(run, *inputs, states, whole)) / PROMPT for run in ops]
    found += [best(partial(run, *step, states, rows)) for run in ops]
    return [seconds * 1e6 for seconds in found]


@torch.inference_mode()
def main() -> None:
    """Print a table, one line per shape."""
    modulm_kernels_cpu.set_threads(torch.get_num_threads())
    print(f"level {modulm_kernels_cpu.load().level}, {torch.get_num_threads()} threads")
    print(
        f"| shape | us per token of a prompt of {PROMPT}: loop | twin | kernel | "
        f"us per step of {ROWS} rows: twin | kernel |"
    )
    print("|---|---|---|---|---|---|")
    for name, case in SHAPES.items():
        print(f"| {name} | " + " | ".join(f"{x:.1f}" for x in measure(*case)) + " |", flush=True)


if __name__ == "__main__":
    main()
