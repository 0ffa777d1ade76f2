"""The machine's peaks, of which other figures are fractions.

    python bench/probe.py [--json FILE]

Read bandwidth with all cores, instruction rates, and the rate of a large product (`gemm_rate`) with
torch's oneDNN. Other load changes all of them: run it just before the benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch

import modulm_kernels_cpu as kernels
from modulm_kernels_cpu.probe import instruction_rates, read_bandwidth


def gemm_rate(size: int = 2048, seconds: float = 1.0, sustained: bool = False) -> float:
    """GFLOP/s of a product [size, size] x [size, size] on packed weights with all cores, the best
    run: in bf16, or in fp32 on processors for which oneDNN has no bf16.

    sustained: the mean of all runs, which is what work of many seconds can reach.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # an engine's front end has one
    dtype = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    x, weight = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, size)
    taken, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        taken.append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    return 2 * size**3 / (statistics.mean(taken) if sustained else min(taken)) / 1e9


def probe() -> dict[str, object]:
    """All peaks by name: GB/s for reading, GFLOP/s or GOP/s (2 per multiplication) for the rest."""
    library = kernels.load()
    rates = instruction_rates(library)
    return {
        "machine": platform.processor() or platform.machine(),
        "level": library.level,
        "threads": library.threads,
        "read GB/s": round(read_bandwidth(library), 1),
        "gemm GFLOP/s": round(gemm_rate()),
        **{f"{name} G/s": round((1 if name == "vpermw" else 2) * r) for name, r in rates.items()},
    }


def main() -> None:
    """Print the table; write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    found = probe()
    for name, value in found.items():
        print(f"{name:20} {value}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
