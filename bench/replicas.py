"""Replicas compared with one engine: python bench/replicas.py CHECKPOINT [--rounds 5] [--only
tokens|hits]

tokens: 32 streams on two replicas of one thread each, and on one engine with two threads,
alternating. hits: share of prompt tokens found in caches with 50 shared prefixes, on one engine and
on two replicas with half of its cache each (on a tiny model, which does not affect the counts).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from modulm import AsyncLLM, SamplingParams
from modulm.contracts.sampling import OutputKind
from modulm.testing.checkpoints import make_tiny

STREAMS, PROMPT, ANSWER, EACH = 32, 8, 48, 3
PREFIXES, SHARED, OWN, TIMES = 50, 192, 16, 16


async def ask(llm: AsyncLLM, name: str, prompt: list[int], tokens: int) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, output_kind=OutputKind.DELTA
    )
    async for _ in llm.generate({"prompt_token_ids": prompt}, params, name):
        pass


async def crowd(llm: AsyncLLM, label: str, salt: int) -> float:
    """Output tokens per second of all streams."""
    asked = STREAMS * EACH
    prompts = np.random.default_rng(salt).integers(10, 900, (asked, PROMPT)).tolist()
    left = list(enumerate(prompts))

    async def stream() -> None:
        while left:
            n, prompt = left.pop()
            await ask(llm, f"{label}{salt}-{n}", prompt, ANSWER)

    began = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(STREAMS)))
    return asked * ANSWER / (time.perf_counter() - began)


async def tokens(folder: str, rounds: int) -> None:
    flags = {"max_model_len": 256, "max_num_seqs": STREAMS, "num_gpu_blocks_override": 200,
             "speculative": "off"}  # fmt: skip
    one = AsyncLLM(folder, cpu_threads=2, **flags)
    two = AsyncLLM(folder, data_parallel_size=2, cpu_threads=1, **flags)
    found: dict[str, list[float]] = {"one": [], "two": []}
    for turn in range(rounds + 1):
        for label, llm in (("one", one), ("two", two)):
            rate = await crowd(llm, label, turn)
            if turn:
                found[label].append(rate)
    one.shutdown()
    two.shutdown()
    ratio = statistics.median(b / a for a, b in zip(found["one"], found["two"], strict=True))
    print(f"{STREAMS} streams, tokens/s: one engine of two threads "
          f"{statistics.median(found['one']):.1f}, two replicas of one thread "
          f"{statistics.median(found['two']):.1f}, ratio {ratio:.3f}")  # fmt: skip


async def hits() -> None:
    rng = np.random.default_rng(1)
    prefixes = rng.integers(10, 120, (PREFIXES, SHARED)).tolist()
    order = rng.permutation(np.repeat(np.arange(PREFIXES), TIMES)).tolist()
    prompts = [prefixes[n] + rng.integers(10, 120, OWN).tolist() for n in order]
    with tempfile.TemporaryDirectory() as place:
        folder = str(make_tiny(Path(place) / "tiny"))
        shares = []
        for size in (1, 2):
            blocks = 3 * PREFIXES * SHARED // 32 // 2 // size
            llm = AsyncLLM(folder, data_parallel_size=size, cpu_threads=1, max_model_len=256,
                           num_gpu_blocks_override=blocks, max_num_seqs=8)  # fmt: skip
            gate = asyncio.Semaphore(8)

            async def limited(n: int, prompt: list[int], llm: AsyncLLM = llm) -> None:
                async with gate:  # noqa: B023
                    await ask(llm, str(n), prompt, 8)

            await asyncio.gather(*(limited(n, prompt) for n, prompt in enumerate(prompts)))
            _, _, queried, hit = llm.metrics.totals()
            shares.append(hit / queried)
            llm.shutdown()
    print(f"{PREFIXES} shared prefixes, found in caches: one engine {shares[0]:.3f}, two replicas "
          f"{shares[1]:.3f}, ratio {shares[1] / shares[0]:.3f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("tokens", "hits"))
    options = parser.parse_args()
    if options.only != "hits":
        asyncio.run(tokens(options.checkpoint, options.rounds))
    if options.only != "tokens":
        asyncio.run(hits())


if __name__ == "__main__":
    main()
