"""Sparse attention beside dense attention over the same latent cache, with DeepSeek-V3.2's sizes.

python bench/sparse_attention.py [--context 32768] [--tokens 1 16] [--layer sdpa]

Times of one layer's attention in ms: the indexer and attention over the selected tokens, beside
attention over all tokens. All three are calls of the attention backend in one process, and runs
of both alternate.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from attrs import evolve, frozen

from modulm.contracts.attention import AttentionInputs, AttentionSpec, StepLayout
from modulm.contracts.platform import Platform
from modulm.ops import bind
from modulm.plugins import manager

HEADS, LATENT, ROPE = 128, 512, 64
INDEX_HEADS, INDEX_SIZE, PICKS = 64, 128, 2048
DENSE = AttentionSpec(
    heads=HEADS,
    kv_heads=1,
    head_dim=LATENT + ROPE,
    scale=192**-0.5,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    latent=LATENT,
)
CHOSEN = evolve(DENSE, selection=1)
INDEXER = AttentionSpec(
    heads=INDEX_HEADS,
    kv_heads=1,
    head_dim=INDEX_SIZE,
    scale=(INDEX_SIZE * INDEX_HEADS) ** -0.5,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    picks=PICKS,
)


@frozen(eq=False)
class Layer:
    """A backend of one spec with a filled cache, and a step's last tokens."""

    step: Callable[[AttentionInputs], torch.Tensor]
    tokens: int

    @classmethod
    def of(
        cls, name: str, spec: AttentionSpec, platform: Platform, context: int, tokens: int
    ) -> Layer:
        ops = bind([provider() for provider in _kernels(platform)])
        driver = manager.current().load("attention", name)
        reason = driver.refuses(spec, platform, ops)
        if reason is not None:
            raise SystemExit(f"{name}: {reason}")
        size = next(iter(driver.block_sizes(spec)), 64)
        backend = driver(spec, platform, ops, size)
        count = -(-context // size)
        layout = backend.layout(count + 1)
        cache = torch.zeros(layout.shape, dtype=getattr(torch, layout.dtype))
        table = (1 + np.random.default_rng(0).permutation(count)).astype(np.int32)[None]

        def place(end: int, new: int) -> StepLayout:
            at = np.arange(end - new, end)
            slots = table[0, at // size].astype(np.int64) * size + at % size
            starts = np.array([0, new], np.int32)
            return StepLayout(size, table, starts, np.array([end], np.int32), slots)

        keys = torch.randn(context, 1, spec.head_dim).bfloat16()
        if name == "sdpa":
            cache.view(-1, 1, spec.head_dim)[place(context, context).slots] = keys
        else:
            backend.write_kv(keys, keys, cache, torch.from_numpy(place(context, context).slots))
        q = torch.randn(tokens, spec.heads, spec.head_dim).bfloat16()
        plan, k = backend.plan(place(context, tokens)), keys[-tokens:]
        out = (
            torch.empty(tokens, 1, spec.picks, dtype=torch.int32)
            if spec.picks
            else q.new_empty(tokens, spec.heads, LATENT)
        )

        def run(inputs: AttentionInputs) -> torch.Tensor:
            backend.forward(q, k, k, cache, plan, out, inputs)
            return out

        return cls(run, tokens)


def _kernels(platform: Platform) -> list[type]:
    from modulm.plugins import defaults

    return list(defaults.choose_kernels(manager.current(), platform).driver)


def measure(name: str, context: int, tokens: int, seconds: float) -> tuple[float, float, float]:
    """The shortest times in seconds: of the indexer, of selected attention, of dense attention."""
    platform = manager.current().load("platforms", "cpu")()
    torch.manual_seed(0)
    dense, indexer, chosen = (
        Layer.of(name, spec, platform, context, tokens) for spec in (DENSE, INDEXER, CHOSEN)
    )
    weights = AttentionInputs(head_weights=torch.randn(tokens, INDEX_HEADS))
    best = [float("inf")] * 3
    until = time.perf_counter() + seconds
    rounds = 0
    while rounds < 2 or time.perf_counter() < until:
        rounds += 1
        clock = [time.perf_counter()]
        picked = AttentionInputs(selected=indexer.step(weights))
        clock.append(time.perf_counter())
        chosen.step(picked)
        clock.append(time.perf_counter())
        dense.step(AttentionInputs())
        clock.append(time.perf_counter())
        best = [min(old, new) for old, new in zip(best, np.diff(clock), strict=True)]
    return best[0], best[1], best[2]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--layer", default="cpu_paged", choices=("cpu_paged", "sdpa"))
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    print(f"{arguments.layer}, context of {arguments.context}, {torch.get_num_threads()} threads")
    print("new tokens  indexer ms  selected ms  dense ms  dense / sparse")
    for tokens in arguments.tokens:
        index, chosen, dense = measure(
            arguments.layer, arguments.context, tokens, arguments.seconds
        )
        ratio = dense / (index + chosen)
        print(
            f"{tokens:>10}  {index * 1e3:>10.1f}  {chosen * 1e3:>11.1f}"
            f"  {dense * 1e3:>8.1f}  {ratio:>14.2f}"
        )


if __name__ == "__main__":
    main()
