"""The gain of the prefix cache with a long shared prefix, and its cost without.

    python bench/prefix_cache.py [MODEL] [--prefix 2000] [--requests 64]

Times are CPU times, so that other load changes little.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import numpy as np

from modulm import LLM, SamplingParams
from modulm.testing.checkpoints import make_tiny

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def seconds(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    """CPU time of generating for all prompts."""
    began = time.process_time()
    llm.generate(prompts, params, use_tqdm=False)
    return time.process_time() - began


def first_token(llm: LLM, prefix: int) -> tuple[float, float]:
    """Return (miss, hit): medians for a prompt of `prefix` tokens and ten unique ones."""
    generator = np.random.default_rng(0)
    misses, hits = [], []
    for _ in range(5):
        head = generator.integers(10, llm.info.vocabulary, prefix).tolist()
        for found in (misses, hits):
            tail = generator.integers(10, llm.info.vocabulary, 10).tolist()
            found.append(seconds(llm, [head + tail], ONE))
    return statistics.median(misses), statistics.median(hits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--prefix", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=64)
    options = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    model = options.model or str(
        make_tiny(f"{folder.name}/tiny", hidden_size=256, max_position_embeddings=4096)
    )
    generator = np.random.default_rng(1)
    params = ONE.with_(max_tokens=64)
    costs: dict[bool, list[float]] = {True: [], False: []}
    engines = {
        cached: LLM(
            model=model,
            enable_prefix_caching=cached,
            cpu_threads=1,
            kv_cache_memory_bytes=1 << 25,
            max_num_batched_tokens=4096,
        )
        for cached in costs
    }
    for llm in engines.values():
        seconds(llm, [[9] * 64], params)
    # The pool is small, so that it is evicting as in steady state.
    for _ in range(9):
        rows = generator.integers(10, engines[True].info.vocabulary, (options.requests, 128))
        for cached, llm in engines.items():
            costs[cached].append(seconds(llm, rows.tolist(), params))
    miss, hit = first_token(engines[True], options.prefix)
    print(f"first token after {options.prefix} tokens: miss {miss * 1e3:.1f} ms, "
          f"hit {hit * 1e3:.1f} ms, ratio {hit / miss:.3f}")  # fmt: skip
    on, off = (statistics.median(costs[cached][3:]) for cached in (True, False))
    print(f"nothing shared: {off:.2f} s without, {on:.2f} s with ({(on / off - 1) * 100:+.1f}%)")


if __name__ == "__main__":
    main()
