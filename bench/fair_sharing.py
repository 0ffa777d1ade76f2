"""Time to first token of one key while another floods the engine.

Measures, in one process, with the real engine: `other` alone, then beside `flood`, which always has
`--requests` requests in progress, with the policies fcfs and fair.

    python bench/fair_sharing.py [--model demo] [--requests 64] [--samples 15]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from itertools import count

from modulm import AsyncLLM, SamplingParams
from modulm_server.engine.client import Tenant

_NUMBERS = count()


async def first_token(engine: AsyncLLM, tenant: str, prompt: int, tokens: int) -> float:
    """Seconds to the first token of one request, which runs to its end."""
    number = next(_NUMBERS)
    ids = [300 + (number * 31 + place * 7) % 200 for place in range(prompt)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    began, first = time.perf_counter(), 0.0
    ids = {"prompt_token_ids": ids}
    async for _ in engine.generate(ids, params, f"r{number}", tenant=Tenant(tenant)):
        first = first or time.perf_counter() - began
    return first


async def flood(engine: AsyncLLM) -> None:
    """Requests without end."""
    while True:
        await first_token(engine, "flood", 100, 50)


async def measure(args: argparse.Namespace, policy: str, requests: int) -> dict[int, float]:
    """Median seconds to the first token of `other`, by length of its prompts."""
    engine = AsyncLLM(
        args.model, scheduling_policy=policy, max_num_seqs=args.rows,
        max_num_batched_tokens=args.budget, enable_prefix_caching=False,
        disable_frontend_multiprocessing=True,
    )  # fmt: skip
    try:
        tasks = [asyncio.create_task(flood(engine)) for _ in range(requests)]
        await asyncio.sleep(2 if requests else 0)
        medians = {}
        for prompt in args.prompts:
            seconds = []
            for _ in range(args.samples):
                seconds.append(await first_token(engine, "other", prompt, 2))
                await asyncio.sleep(args.pause)
            medians[prompt] = statistics.median(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return medians
    finally:
        engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between samples")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 256, 1024])
    args = parser.parse_args()
    alone = asyncio.run(measure(args, "fair", 0))
    print(
        "| prompt tokens | alone | " + " | ".join(f"beside a flood, {p}" for p in ("fcfs", "fair"))
    )
    beside = [asyncio.run(measure(args, policy, args.requests)) for policy in ("fcfs", "fair")]
    for prompt, seconds in alone.items():
        cells = [f"{each[prompt] * 1e3:.0f} ms ({each[prompt] / seconds:.2f})" for each in beside]
        print(f"| {prompt} | {seconds * 1e3:.0f} ms | " + " | ".join(cells))


if __name__ == "__main__":
    main()
