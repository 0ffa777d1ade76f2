"""`modulm tune`: measure constants of kernels on this GPU and keep the best.

Sizes of tiles, warps and pipeline stages are tried on products, experts, attention and norms of a
model's sizes. The best ones are written to `tuning.json` in the cache folder, under the device's
name; the kernels read them from there at the next start (tuning.py). No candidate changes a sum
depending on the number of rows, so results of a row stay independent of other rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from attrs import frozen

from modulm.errors import UnsupportedError

__all__ = ["Problem", "measure", "problems", "tune"]

Constants = Mapping[str, int]


@frozen(eq=False)
class Problem:
    """One entry of the table that is measured.

    upto: the bounds that the entry is written with. candidates: constants to try. make: prepares
    tensors, and returns the call whose time counts.
    """

    kernel: str
    upto: Constants
    candidates: Sequence[Constants]
    make: Callable[[], Callable[[], object]]


def _grid(**values: Sequence[int]) -> list[dict[str, int]]:
    return [dict(zip(values, some, strict=True)) for some in product(*values.values())]


def _linear(sizes: Any, rows: int, device: torch.device) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        import modulm_kernels_triton

        ops = modulm_kernels_triton.ops()
        codes = torch.zeros(sizes.intermediate, sizes.hidden, dtype=torch.int8, device=device)
        scales = torch.ones(sizes.intermediate, 1, device=device)
        packed = ops["pack_quantized"](codes, "int8", 0, scales, None, "int8")
        x = torch.randn(rows, sizes.hidden, dtype=sizes.dtype, device=device)
        return lambda: ops["linear"](x, packed)

    return make


def _experts(sizes: Any, rows: int, device: torch.device) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        import modulm_kernels_triton

        ops, experts, inner = modulm_kernels_triton.ops(), 8, max(16, sizes.intermediate // 8)
        gate_up, down = (
            torch.randn(experts, *shape, dtype=sizes.dtype, device=device)
            for shape in ((2 * inner, sizes.hidden), (sizes.hidden, inner))
        )
        tokens = rows * experts // 2
        x = torch.randn(tokens, sizes.hidden, dtype=sizes.dtype, device=device)
        ids = torch.arange(2 * tokens, device=device).view(tokens, 2) % experts
        shares = torch.ones(tokens, 2, device=device)
        return lambda: ops["fused_experts"](x, shares, ids, gate_up, down)

    return make


def _norm(sizes: Any, device: torch.device) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        import modulm_kernels_triton

        ops = modulm_kernels_triton.ops()
        x = torch.randn(256, sizes.hidden, dtype=sizes.dtype, device=device)
        return lambda: ops["rms_norm"](x, x[0], 1e-6)

    return make


def _attention(
    sizes: Any, counts: Sequence[int], context: int, device: torch.device
) -> Callable[[], Callable[[], object]]:
    """Rows with `counts` new tokens, at the end of `context` cached ones."""

    def make() -> Callable[[], object]:
        from modulm_kernels_triton import paged

        form = paged.CacheForm(
            sizes.kv_heads, 16, sizes.head_dim, sizes.head_dim, sizes.dtype
        )  # fmt: skip
        rows, each = len(counts), -(-context // 16)
        cache = torch.zeros(form.shape(rows * each + 1), dtype=sizes.dtype, device=device)
        group = sizes.heads // sizes.kv_heads
        starts = [sum(counts[:row]) for row in range(rows + 1)]
        few = counts[0] <= paged.FEW
        tokens = paged.queries_of_a_tile("split" if few else "prompt", group, form, sizes.dtype)[0]
        tiles = [
            [row, at, at]
            for row in range(rows)
            for at in range(starts[row], starts[row + 1], tokens)
        ]
        numbers: list[Any] = [
            starts, [context] * rows, [context] * rows, [] if few else tiles, tiles if few else [],
            list(range(starts[-1])) if few else [],
        ]  # fmt: skip
        arrays = [torch.tensor(one, dtype=torch.int32, device=device) for one in numbers]
        arrays[3], arrays[4] = arrays[3].view(-1, 3), arrays[4].view(-1, 3)
        table = 1 + torch.arange(rows * each, dtype=torch.int32, device=device).view(rows, each)
        work = paged.Work(table, *arrays)
        q = torch.randn(starts[-1], sizes.heads, sizes.head_dim, dtype=sizes.dtype, device=device)
        out = torch.empty_like(q)
        return lambda: paged.paged_attention(q, cache, form, work, 1.0, out, paged.Look())

    return make


def problems(sizes: Any, device: torch.device, *, tiny: bool = False) -> Iterator[Problem]:
    """Yield what is measured for a model of these sizes; tiny: a few candidates, for a dry run."""
    from modulm_kernels_triton.launch import power_of_two

    width = {"BYTES": sizes.dtype.itemsize}
    tiles = _grid(BN=(32, 64, 128), num_warps=(4, 8), num_stages=(2, 3, 4, 5))
    for rows in (16,) if tiny else (16, 32, 64, 256):
        wide = [{"BM": min(rows, 128), **one} for one in tiles[:2] if tiny] or [
            {"BM": size, **one} for size in sorted({min(rows, 64), min(rows, 128)}) for one in tiles
        ]
        yield Problem("linear", {"M": rows, **width}, wide, _linear(sizes, rows, device))
    for rows in (16,) if tiny else (16, 64, 128):
        some = tiles[:2] if tiny else tiles
        yield Problem("fused_experts", {"BM": rows, **width}, some, _experts(sizes, rows, device))
    block = power_of_two(sizes.hidden)
    warps = _grid(num_warps=(4, 8) if tiny else (2, 4, 8, 16))
    yield Problem("rms_norm", {"BLOCK": block}, warps, _norm(sizes, device))
    head = {"SIZE": sizes.head_dim, "BITS": 8 * sizes.dtype.itemsize}
    fixed = {"LEAST": 256, "PROGRAMS": 128, "SHARES": 4}
    some = [
        {**one, **fixed}
        for one in _grid(BLOCK_M=(16,), TILE=(16, 32, 64), num_warps=(4, 8), num_stages=(2, 3, 5))
    ]
    work = _attention(sizes, [1] * (1 if tiny else 64), 32 if tiny else 4096, device)
    yield Problem("attention_split", head, some[:2] if tiny else some, work)
    some = _grid(BLOCK_M=(32, 64, 128), TILE=(32, 64), num_warps=(4, 8), num_stages=(2, 3, 5))
    prompt = 16 if tiny else 4096
    work = _attention(sizes, [prompt], prompt, device)
    yield Problem("attention_prompt", head, some[:2] if tiny else some, work)


def measure(call: Callable[[], object], device: torch.device, times: int) -> float:
    """Return the least seconds of a call, after one that compiles and one that warms up."""

    def wait() -> None:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()

    best = float("inf")
    for turn in range(2 + times):
        wait()
        began = time.perf_counter()
        call()
        wait()
        if turn > 1 or not times:
            best = min(best, time.perf_counter() - began)
    return best


def tune(
    sizes: Any,
    device: torch.device,
    *,
    tiny: bool = False,
    told: Callable[[str], None] = lambda _: None,
) -> dict[str, list[dict[str, Any]]]:
    """Measure all problems and return the entries of the table for this device.

    Candidates that do not compile, or need more shared memory than there is, are left out.
    """
    from modulm_kernels_triton.tuning import trying

    entries: dict[str, list[dict[str, Any]]] = {}
    for problem in problems(sizes, device, tiny=tiny):
        times: list[tuple[float, Constants]] = []
        for candidate in problem.candidates:
            with trying(problem.kernel, candidate):
                try:
                    times.append((measure(problem.make(), device, 1 if tiny else 7), candidate))
                except Exception as error:  # of the compiler or the driver: no common base class
                    told(f"{problem.kernel} {dict(candidate)}: {str(error).splitlines()[0][:80]}")
        if not times:
            raise UnsupportedError(f"{problem.kernel}: no candidate runs on this device")
        seconds, best = min(times, key=lambda pair: pair[0])
        worst = max(times, key=lambda pair: pair[0])[0]
        told(
            f"{problem.kernel} {dict(problem.upto)}: {dict(best)}, {seconds * 1e6:.0f} us "
            f"(slowest {worst * 1e6:.0f} us, {len(times)} of {len(problem.candidates)} ran)"
        )
        entries.setdefault(problem.kernel, []).append({"upto": dict(problem.upto), **best})
    return entries
