"""Compares the engine in a thread with the engine in a process.

Many concurrent streams of one model; every delta is serialized as an API chunk, as in a server. Run
on an otherwise idle machine:

    python bench/front_ends.py MODEL [--streams 1 32] [--tokens 128] [--prompt 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

import numpy as np

from modulm import AsyncLLM, SamplingParams
from modulm.contracts.sampling import OutputKind


async def stream(engine: AsyncLLM, name: str, prompt: list[int], tokens: int) -> tuple[float, int]:
    """Return (seconds to the first token, tokens) of one request."""
    began, first, received = time.perf_counter(), 0.0, 0
    params = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, output_kind=OutputKind.DELTA
    )
    async for output in engine.generate({"prompt_token_ids": prompt}, params, name):
        first = first or time.perf_counter() - began
        delta = output.outputs[0]
        received += len(delta.token_ids)
        chunk = {"id": name, "object": "chunk", "choices": [{"delta": {"content": delta.text}}]}
        json.dumps(chunk).encode()
    return first, received


async def crowd(engine: AsyncLLM, label: str, streams: int, options: argparse.Namespace) -> None:
    """Run `streams` requests concurrently and print one line."""
    generator = np.random.default_rng(streams)
    prompts = generator.integers(10, engine.info.vocabulary - 10, (streams, options.prompt))
    await stream(engine, "warm", prompts[0].tolist(), 4)
    began = time.perf_counter()
    jobs = [
        stream(engine, f"{streams}-{n}", row.tolist(), options.tokens)
        for n, row in enumerate(prompts)
    ]
    results = await asyncio.gather(*jobs)
    seconds = time.perf_counter() - began
    rate = sum(received for _, received in results) / seconds
    first = sum(seconds for seconds, _ in results) / streams
    print(f"{label:>8} {streams:>8} {rate:>12.1f} {first * 1e3:>12.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    print(f"{'engine':>8} {'streams':>8} {'tokens/s':>12} {'first ms':>12}")
    for _ in range(options.repeat):
        for inside in (True, False):
            began = time.perf_counter()
            engine = AsyncLLM(model=options.model, disable_frontend_multiprocessing=inside)
            label = "thread" if inside else "process"
            print(f"# {label}: ready after {time.perf_counter() - began:.2f} s")
            for streams in options.streams:
                asyncio.run(crowd(engine, label, streams, options))
            engine.shutdown()


if __name__ == "__main__":
    main()
