"""Ranks that share a model, compared with one process with as many threads; rounds alternate.

    python bench/parallel.py CHECKPOINT [--rounds 6] [--only streams|prompt|step|reduce]

CHECKPOINT: a folder of Qwen3-0.6B's shape for streams and prompts. "step" is the overhead per step
of a tiny model with one `mp` worker compared with the engine's process; "reduce" is an all-reduce
of a row of 1,024 bf16 between two processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from modulm import LLM, SamplingParams
from modulm.testing.checkpoints import make_tiny

CORES = len(os.sched_getaffinity(0))


def opened(folder: str, length: int = 2400, **flags: object) -> LLM:
    return LLM(
        folder,
        max_model_len=length,
        max_num_seqs=32,
        num_gpu_blocks_override=400,
        max_num_batched_tokens=2400,
        enable_prefix_caching=False,
        use_tqdm_on_load=False,
        speculative="off",
        **flags,
    )


def seconds(llm: LLM, rows: int, prompt: int, tokens: int, salt: int) -> float:
    prompts = [
        {"prompt_token_ids": [5 + (salt + row * 7 + at) % 900 for at in range(prompt)]}
        for row in range(rows)
    ]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


def turns(llms: dict[str, LLM], rounds: int, *shape: int, warm: int = 0) -> dict[str, list[float]]:
    """Seconds by engine and round, without the first round and `warm` runs per turn."""
    found: dict[str, list[float]] = {name: [] for name in llms}
    for turn in range(rounds + 1):
        for name, llm in llms.items():
            for _ in range(warm + 1):
                taken = seconds(llm, *shape, turn)
            if turn:
                found[name].append(taken)
    return found


def ratios(found: dict[str, list[float]], tokens: int, what: str) -> None:
    base = found["one process"]
    for name, taken in found.items():
        median = statistics.median(b / t for b, t in zip(base, taken, strict=True))
        print(f"| {what} | {name} | {tokens / statistics.median(taken):.1f} | {median:.3f} |")


def big(folder: str, rounds: int, only: str) -> None:
    llms = {
        "one process": opened(folder, cpu_threads=CORES),
        "mp, one worker": opened(folder, distributed_executor_backend="mp", cpu_threads=CORES),
        "two ranks": opened(folder, tensor_parallel_size=2),
    }
    print("| | | tokens/s | to one process |\n|---|---|---:|---:|")
    if only in ("", "streams"):
        ratios(turns(llms, rounds, 1, 8, 48), 48, "one stream")
        ratios(turns(llms, rounds, 16, 8, 24), 16 * 24, "16 streams")
    if only in ("", "prompt"):
        ratios(turns(llms, rounds, 1, 2048, 1), 2048, "prompt of 2,048")
    for llm in llms.values():
        llm.shutdown()


def step(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = str(make_tiny(Path(name) / "tiny"))
        llms = {
            "one process": opened(folder, 256, dtype="float32"),
            "mp": opened(folder, 256, dtype="float32", distributed_executor_backend="mp"),
        }
        # Processes are slow after sleeping, and those of an engine sleep during the others' turns.
        found = turns(llms, rounds, 1, 8, 200, warm=2)
        each = {n: statistics.median(t) / 200 * 1e6 for n, t in found.items()}
        more = each["mp"] - each["one process"]
        print(f"a step of a tiny model: {each['one process']:.0f} us, mp {more:.0f} us more")
        for llm in llms.values():
            llm.shutdown()


def reduce(calls: int = 20000) -> None:
    """Time an all-reduce of both processes: the best mean of five runs of `calls` calls."""
    from modulm.plugins import manager
    from modulm_distributed.mesh import RankSpec, open_mesh

    folder = tempfile.mkdtemp()
    child = os.fork()
    rank = 0 if child else 1
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    import modulm_kernels_cpu

    modulm_kernels_cpu.set_threads(1)
    plugins = manager.current()
    platform = plugins.load("platforms", "cpu")()
    group = open_mesh(RankSpec(rank, 2, 1, f"file:{folder}/store"), platform, plugins).tensor
    x = torch.randn(1, 1024).bfloat16()
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(calls):
            group.all_reduce(x)
        best = min(best, (time.perf_counter() - began) / calls * 1e6)
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    print(f"a sum of 1,024 bf16 between two processes: {best:.1f} us, with its Python")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", default="", choices=["", "streams", "prompt", "step", "reduce"])
    given = parser.parse_args()
    if given.only in ("", "reduce"):
        reduce()
    if given.only in ("", "step"):
        step(given.rounds)
    if given.checkpoint and given.only in ("", "streams", "prompt"):
        big(given.checkpoint, given.rounds, given.only)


if __name__ == "__main__":
    sys.exit(main())
