"""Each CPU kernel compared with its limit and with torch, in one run.

    python bench/kernels.py [--level LEVEL ...] [--only TEXT] [--seconds S] [--json FILE]

Prints a line per op and shape (those of Qwen3-0.6B): microseconds, the rate of reading or
computing, that rate as a fraction of the peak that `bench/probe.py` measures at the start of the
run, and the speedup over plain torch. Times are the best of many runs, because means on a shared
machine depend on other load.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from probe import probe

import modulm_kernels_cpu as kernels
from modulm.ops import sampling_twins, twins
from modulm.testing.paged_attention import qkv_prepare
from modulm_kernels_cpu.memory import huge_buffer

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCABULARY = 1024, 3072, 16, 8, 128, 151936
COPIES = 40  # weight copies that are cycled through
STREAM = 1 << 30  # bytes of weights for bandwidth-bound cases: more than any cache holds


@dataclass
class Case:
    """One line. `run`: the kernel. `other`: the torch version. `bytes` or `flops`: its work."""

    name: str
    run: Callable[[], object]
    other: Callable[[], object]
    bytes: float = 0.0
    flops: float = 0.0
    times: float = 1.0  # calls of `other` per call of `run`


def best_time(run: Callable[[], object], seconds: float) -> float:
    """Time the fastest call within `seconds`."""
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def cases(ops) -> Iterator[Case]:
    """Yield all cases, created on demand."""
    yield from linears(ops)
    yield from attentions(ops)
    yield from small(ops)
    yield from samplers(ops)


def linears(ops) -> Iterator[Case]:
    outputs, inputs = 2 * INNER, HIDDEN
    plain = [torch.randn(outputs, inputs).bfloat16() / 32 for _ in range(COPIES)]
    for form in ("bf16", "fp8", "int8", "w8a8", "int4", "w4a8"):
        packed = [pack(ops, w, form) for w in plain]
        while len(packed) * packed[0].bytes < STREAM:
            packed.append(pack(ops, plain[len(packed) % COPIES], form))
        yield from products(ops, form, plain, packed, (1, 4, 16, 32, 64, 512))
    wide = [w.float() for w in plain[: COPIES // 2]]
    packed = [ops["pack_linear"](w) for w in wide]
    yield from products(ops, "fp32", wide, packed, (1, 4, 16, 64, 512))


def products(ops, form: str, plain, packed, counts) -> Iterator[Case]:
    """Compare a linear layer with torch's on the float weight."""
    outputs, inputs = plain[0].shape
    for rows in counts:
        x = torch.randn(rows, inputs).to(plain[0].dtype)
        out = torch.empty(rows, outputs, dtype=x.dtype)
        streams = rows <= 4
        used = packed if streams else packed[: len(plain)]
        yield Case(
            f"linear {form} M={rows}",
            lambda x=x, out=out, used=used: [ops["linear"](x, w, None, out) for w in used],
            lambda x=x: [F.linear(x, w) for w in plain],
            bytes=sum(p.bytes for p in used) if streams else 0.0,
            flops=0.0 if streams else 2.0 * rows * outputs * inputs * len(plain),
            times=len(used) / len(plain),
        )


def pack(ops, weight: torch.Tensor, form: str) -> kernels.PackedLinear:
    """Quantize without regard to accuracy, which does not affect the time.

    int8 and int4 have 16-bit activations, w8a8 and w4a8 8-bit ones; 4-bit codes have groups of 64
    with zero points.
    """
    if form == "bf16":
        return ops["pack_linear"](weight)
    activations = "int8" if form.endswith("a8") else "bf16"
    if form in ("int4", "w4a8"):
        groups = weight.shape[1] // 64
        codes = (weight * 100).clamp(0, 15).to(torch.uint8)
        scales = torch.rand(weight.shape[0], groups).bfloat16()
        zeros = (scales * 15).round()
        return ops["pack_linear"](codes, "int4", 64, scales, zeros, activations)
    codes = (weight * 100).to(torch.float8_e4m3fn if form == "fp8" else torch.int8)
    name = "fp8" if form == "fp8" else "int8"
    return ops["pack_linear"](codes, name, 0, torch.rand(weight.shape[0]), None, activations)


@dataclass(frozen=True)
class Attended:
    """A step of `rows` sequences of `context` tokens, the last `fresh` of them new.

    `latent` is the rank of a compressed cache with one head of `size`, which all heads share.
    """

    name: str
    context: int
    fresh: int = 1
    rows: int = 1
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    size: int = HEAD
    latent: int = 0
    kept: torch.dtype = torch.bfloat16
    block: int = 32

    @property
    def flops(self) -> float:
        """FLOPs of both products, excluding what the causal mask removes."""
        pairs = self.fresh * (self.context - (self.fresh - 1) / 2)
        return 2.0 * self.rows * self.heads * pairs * (self.size + (self.latent or self.size))


ATTENDED = (
    Attended("decode, 1 row of 8192", 8192),
    Attended("decode, 32 rows of 512", 512, rows=32),
    Attended("decode, 1 row of 8192, int8", 8192, kept=torch.int8),
    Attended("decode, 1 row of 8192, fp8", 8192, kept=torch.float8_e4m3fn),
    Attended("decode, 1 row of 32768", 32768),
    Attended("decode, 1 row of 32768, int8", 32768, kept=torch.int8),
    Attended("decode, 1 row of 131072", 131072),
    Attended("decode, 1 row of 131072, int8", 131072, kept=torch.int8),
    Attended("decode, 1 row of 8192, latent, 16 heads", 8192, 1, 1, 16, 1, 576, 512),
    Attended("decode, 1 row of 8192, latent, 128 heads", 8192, 1, 1, 128, 1, 576, 512),
    Attended("prefill of 2048", 2048, 2048),
    Attended("prefill of 2048, int8", 2048, 2048, kept=torch.int8),
    Attended("prefill of 2048, fp8", 2048, 2048, kept=torch.float8_e4m3fn),
    Attended("prefill of 512 after 32256", 32768, 512),
    Attended("prefill of 512 after 32256, int8", 32768, 512, kept=torch.int8),
    Attended("prefill of 512 after 130560", 131072, 512),
    Attended("prefill of 512, latent, 16 heads", 512, 512, 1, 16, 1, 576, 512),
)


def attentions(ops) -> Iterator[Case]:
    yield from (attention(ops, step) for step in ATTENDED)


def attention(ops, step: Attended) -> Case:
    """Compare attention; it is bandwidth-bound below 32 queries per cached head.

    torch attends over dense keys and values in bf16 whatever the cache format. Its heads share one
    key as queries of one head, and those of a prompt as separate heads.
    """
    block, rows, fresh = step.block, step.rows, step.fresh
    width = step.context // block
    values = 0 if step.latent else None
    shape = kernels.cache_shape(rows * width, step.kv_heads, block, step.size, values, step.kept)
    cache = huge_buffer(math.prod(shape) * step.kept.itemsize).view(step.kept).view(shape)
    k = torch.randn(rows * step.context, step.kv_heads, step.size).bfloat16()
    ops["write_kv"](k, k, cache, torch.arange(len(k)))
    tables = torch.arange(rows * width, dtype=torch.int32).view(rows, width)
    starts = torch.arange(rows + 1, dtype=torch.int32) * fresh
    lengths = torch.full((rows,), step.context, dtype=torch.int32)
    q = torch.randn(rows * fresh, step.heads, step.size).bfloat16()
    out = torch.empty(rows * fresh, step.heads, step.latent or step.size, dtype=torch.bfloat16)
    plan = ops["plan_attention"](starts, lengths, step.heads, step.kv_heads)
    dense = k.view(rows, step.context, step.kv_heads, step.size).transpose(1, 2).contiguous()
    queries = q.view(rows, fresh, step.heads, step.size).transpose(1, 2).contiguous()
    if step.latent and fresh == 1:
        queries = queries.transpose(1, 2)
    causal = fresh == step.context  # after other tokens, torch's would see only the first ones
    reads = fresh * step.heads // step.kv_heads < 32
    given = (q, cache, tables, starts, lengths, step.size**-0.5, out)
    return Case(
        f"attention {step.name}",
        lambda: ops["paged_attention"](*given, plan=plan),
        lambda: F.scaled_dot_product_attention(
            queries, dense, dense[..., : out.shape[-1]], is_causal=causal, enable_gqa=True
        ),
        bytes=cache.nbytes if reads else 0.0,
        flops=0.0 if reads else step.flops,
    )


def small(ops) -> Iterator[Case]:
    for rows in (1, 32):
        x, residual = (torch.randn(rows, HIDDEN).bfloat16() for _ in range(2))
        weight = torch.ones(HIDDEN).bfloat16()
        yield Case(
            f"add_rms_norm T={rows}",
            lambda a=(x, residual, weight, 1e-6): ops["add_rms_norm"](*a),
            lambda a=(x, residual, weight, 1e-6): twins.add_rms_norm(*a),
        )
        wide = torch.randn(rows, 2 * INNER).bfloat16()
        yield Case(
            f"act_and_mul T={rows}",
            lambda x=wide: ops["act_and_mul"](x, "silu"),
            lambda x=wide: twins.act_and_mul(x, "silu"),
        )
        qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * HEAD).bfloat16()
        norm, table = torch.ones(HEAD).bfloat16(), torch.randn(64, HEAD)
        places = torch.arange(rows)
        mine = torch.zeros(kernels.cache_shape(2, KV_HEADS, 32, HEAD), dtype=torch.bfloat16)
        theirs = torch.zeros(2, 32, KV_HEADS, 2 * HEAD, dtype=torch.bfloat16)
        shared = (qkv, norm, norm, 1e-6, table, places, places)
        yield Case(
            f"qkv_prepare T={rows}",
            lambda a=shared, c=mine: ops["qkv_prepare"](*a, c, HEADS, KV_HEADS),
            lambda a=shared, c=theirs: qkv_prepare(*a, c, HEADS, KV_HEADS),
        )


def samplers(ops) -> Iterator[Case]:
    for rows in (1, 32):
        logits = torch.randn(rows, VOCABULARY) * 3
        yield Case(
            f"argmax R={rows}",
            lambda x=logits: ops["argmax"](x),
            lambda x=logits: sampling_twins.argmax(x),
        )
        settings = (
            torch.full((rows,), 0.8),
            torch.full((rows,), 50, dtype=torch.int32),
            torch.full((rows,), 0.9),
            torch.zeros(rows),
            torch.rand(rows, dtype=torch.float64),
        )
        yield Case(
            f"sample R={rows}, top-k 50, top-p 0.9",
            lambda a=(logits, *settings): ops["sample"](*a),
            lambda a=(logits, *settings): sampling_twins.sample(*a),
        )


def measure(case: Case, peaks: dict[str, object], seconds: float) -> dict[str, object]:
    mine, other = best_time(case.run, seconds), best_time(case.other, seconds)
    work, unit, peak = case.bytes, "GB/s", peaks["read GB/s"]
    if case.flops:
        work, unit, peak = case.flops, "GFLOP/s", peaks["gemm GFLOP/s"]
    rate = work / mine / 1e9
    return {
        "name": case.name,
        "us": mine / case.times * 1e6,
        "rate": rate,
        "unit": unit if work else "",
        "of peak": rate / peak,
        "times torch": other * case.times / mine,
    }


def show(line: dict[str, object]) -> None:
    rate = f"{line['rate']:8.1f} {line['unit']:8} {line['of peak']:5.2f}" if line["unit"] else ""
    print(f"{line['name']:48} {line['us']:10.1f} us {rate:24} x{line['times torch']:.2f}")


def main() -> None:
    """Measure and print; write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--level", choices=kernels.levels(), nargs="+", default=[kernels.levels()[-1]],
        help="default: the best one",
    )  # fmt: skip
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=0.3, help="per case and side")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    peaks = probe()
    print(", ".join(f"{name} {value}" for name, value in peaks.items()))
    results = []
    for level in options.level:
        print(f"level {level}")
        for case in cases(kernels.ops(level)):
            if options.only in case.name:
                results.append({"level": level, **measure(case, peaks, options.seconds)})
                show(results[-1])
    if options.json:
        options.json.write_text(json.dumps({"peaks": peaks, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
