"""Prefill and decode in two processes of one thread each, beside one process that does both.

    python bench/disaggregated.py [--layers 28] [--prompts 5] [--streams 4]
    python bench/disaggregated.py --kills 10 [--requests 2000]

The first form has a model of Qwen3-0.6B's shape with random weights, and prints times between two
tokens of running streams, with and without prompts of 2,048 tokens beside them, and times to first
token. The last row has the same streams beside a process that computes the prompts and sends
nothing: what two processes cost each other on this machine, whatever the transfer. Exits with 1 if
the ratios are above the limits, or if a prompt was not fetched.

The second form has a tiny model and kills replicas of both pools while requests run. Exits with 1
if an answer differs from one engine's, a request fails, or a process or file is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from harness import alive, shared_files
from weight_update import SHAPE

from modulm import LLM, AsyncLLM, SamplingParams
from modulm.contracts.sampling import OutputKind
from modulm.testing.checkpoints import make_tiny

#: Limits of the two ratios.
GAP, FIRST = 1.2, 1.1
PROMPT = 2048
STREAM = SamplingParams(
    temperature=0, max_tokens=100_000, ignore_eos=True, detokenize=False,
    output_kind=OutputKind.DELTA,
)  # fmt: skip
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)


def engine(model: str, pools: tuple[int, int] | None, **flags: Any) -> AsyncLLM:
    """One engine, or pools of prefill and decode replicas. Nothing is drafted."""
    flags = {"speculative": "off", **flags}
    if pools is None:
        return AsyncLLM(model, **flags)
    extra = {"cpu_bytes_to_use": flags.pop("cpu_bytes_to_use")}
    table = {"kv_connector": "peer", "kv_port": 23_571, "kv_connector_extra_config": extra}
    prefill, decode = pools
    return AsyncLLM(
        model, **flags, prefill_replicas=prefill, decode_replicas=decode, kv_transfer_config=table
    )


class Streams:
    """Streams that run until `stop`, and the times of their tokens."""

    def __init__(self, llm: AsyncLLM, count: int) -> None:
        self.gaps: list[tuple[float, float]] = []
        self._tasks = [asyncio.create_task(self._run(llm, number)) for number in range(count)]

    async def _run(self, llm: AsyncLLM, number: int) -> None:
        prompt = {"prompt_token_ids": [100 + number] * 16}
        before = 0.0
        async for _ in llm.generate(prompt, STREAM, f"stream{number}"):
            now = time.perf_counter()
            if before:
                self.gaps.append((now, now - before))
            before = now

    def between(self, start: float, end: float) -> list[float]:
        """Return the seconds between two tokens of a stream, in a span of time."""
        return [gap for at, gap in self.gaps if start <= at <= end]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def random_prompt(number: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(number).integers(200, 150_000, PROMPT).tolist()
    return tokens


async def first_token(llm: AsyncLLM, number: int, cached: int) -> float:
    """Return the seconds to the first token of a new prompt. cached: its least cached tokens."""
    prompt = {"prompt_token_ids": random_prompt(number)}
    began = time.perf_counter()
    async for output in llm.generate(prompt, ONE, f"prompt{number}"):
        if (output.num_cached_tokens or 0) < cached:
            print(f"prompt {number}: {output.num_cached_tokens} tokens were fetched")
            raise SystemExit(1)
    return time.perf_counter() - began


class Computer:
    """A process that computes prompts and sends nothing anywhere."""

    def __init__(self, model: str, flags: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, end = context.Pipe()
        self._process = context.Process(target=self._run, args=(model, flags, end), daemon=True)
        self._process.start()
        self._end.recv()

    @staticmethod
    def _run(model: str, flags: dict[str, Any], end: Connection) -> None:
        with LLM(model, **flags) as llm:
            llm.generate({"prompt_token_ids": random_prompt(0)}, ONE, use_tqdm=False)
            end.send(None)
            with suppress(EOFError):
                while True:
                    prompt = {"prompt_token_ids": random_prompt(end.recv())}
                    llm.generate(prompt, ONE, use_tqdm=False)
                    end.send(None)

    def compute(self, number: int) -> None:
        self._end.send(number)
        self._end.recv()

    def close(self) -> None:
        self._end.close()
        self._process.join()


async def measure(
    llm: AsyncLLM, options: argparse.Namespace, cached: int, computer: Computer | None = None
) -> dict[str, float]:
    """Return the median and the 99th percentile of gaps, and times to first token."""
    await first_token(llm, 0, 0)  # the first one imports and allocates
    idle = [await first_token(llm, 1 + number, cached) for number in range(2)]
    streams = Streams(llm, options.streams)
    await asyncio.sleep(2.0)
    start = time.perf_counter()
    await asyncio.sleep(options.seconds)
    quiet = streams.between(start, time.perf_counter())
    start = time.perf_counter()
    first = [await first_token(llm, 10 + number, cached) for number in range(options.prompts)]
    busy = streams.between(start, time.perf_counter())
    beside: list[float] = []
    if computer is not None:
        start = time.perf_counter()
        for number in range(options.prompts):
            await asyncio.to_thread(computer.compute, 10 + number)
        beside = streams.between(start, time.perf_counter())
    await streams.stop()
    percentiles = {
        f"{name} {percent}": float(np.percentile(gaps, percent))
        for name, gaps in (("quiet", quiet), ("busy", busy), ("beside", beside))
        for percent in (50, 99)
        if gaps
    }
    return {
        "idle": median(idle), "first": median(first), "rate": len(busy) / sum(first),
        **percentiles,
    }  # fmt: skip


def compare(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        shape = {**SHAPE, "num_hidden_layers": options.layers}
        Path(folder, "config.json").write_text(json.dumps(shape))
        flags: dict[str, Any] = {
            "load_format": "dummy", "skip_tokenizer_init": True, "cpu_threads": 1,
            "max_model_len": 4096, "max_num_batched_tokens": options.budget,
            "max_num_seqs": options.streams + 4, "num_gpu_blocks_override": 800,
        }  # fmt: skip
        results = {}
        for name, pools in (("colocated", None), ("disaggregated", (1, 1))):
            more = {"cpu_bytes_to_use": 1 << 30} if pools else {}
            llm = engine(folder, pools, **flags, **more)
            computer = Computer(folder, flags) if pools else None
            try:
                cached = PROMPT - 64 if pools else 0
                results[name] = asyncio.run(measure(llm, options, cached, computer))
            finally:
                llm.shutdown()
                if computer is not None:
                    computer.close()
    print(
        f"{options.layers} layers, {options.streams} streams, {options.prompts} prompts of ", end=""
    )
    print(f"{PROMPT} tokens one after another, {options.budget} tokens per step; times in ms")
    print("| | between tokens, no prompts: median | 99 % | with prompts: median | 99 % | "
          "ratio of 99 % | first token, idle | with streams | tokens/s with prompts |")  # fmt: skip
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name, r in results.items():
        cells = [r[key] * 1000 for key in ("quiet 50", "quiet 99", "busy 50", "busy 99")]
        times = " | ".join(f"{cell:.0f}" for cell in cells)
        ratio = r["busy 99"] / r["quiet 99"]
        print(f"| {name} | {times} | {ratio:.2f} | {r['idle'] * 1000:.0f} | "
              f"{r['first'] * 1000:.0f} | {r['rate']:.1f} |")  # fmt: skip
    apart, together = results["disaggregated"], results["colocated"]
    cells = [apart[key] * 1000 for key in ("quiet 50", "quiet 99", "beside 50", "beside 99")]
    beside = apart["beside 99"] / apart["quiet 99"]
    times = " | ".join(f"{cell:.0f}" for cell in cells)
    print(f"| beside a process that sends nothing | {times} | {beside:.2f} | | | |")
    gap = apart["busy 99"] / apart["quiet 99"]
    first = apart["first"] / together["first"]
    idle = apart["idle"] / together["idle"]
    print(f"between tokens {gap:.2f} (at most {GAP}), {gap / beside:.2f} of beside a process that "
          f"sends nothing; first token {first:.2f} of colocated "
          f"(at most {FIRST}), {idle:.2f} without streams")  # fmt: skip
    return int(gap > GAP or first > FIRST)


async def under_fire(llm: AsyncLLM, options: argparse.Namespace, expected: list[Any]) -> int:
    """Send the requests while replicas are killed; return how many went wrong."""
    rng = random.Random(options.seed)
    numbers = iter(range(options.requests))
    params = ONE.with_(max_tokens=8, output_kind=OutputKind.FINAL_ONLY)
    wrong: list[str] = []
    slowest = done = fetched = aborted = kills = 0.0

    async def client() -> None:
        nonlocal slowest, done, fetched, aborted
        for number in numbers:
            prompt = {
                "prompt_token_ids": prompts()[number % len(expected)],
                "cache_salt": str(number),
            }
            began = time.perf_counter()
            try:
                stream = llm.generate(prompt, params, f"r{number}")
                if number % 10 == 9:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(rng.random() * 0.05):
                            async for _ in stream:
                                pass
                    aborted += 1
                    continue
                output = [each async for each in stream][-1]
                fetched += bool(output.num_cached_tokens)
                if output.outputs[0].token_ids != expected[number % len(expected)]:
                    wrong.append(f"r{number}: another answer")
            except Exception as error:
                wrong.append(f"r{number}: {error}")
            finally:
                done += 1
                slowest = max(slowest, time.perf_counter() - began)

    async def killer() -> None:
        nonlocal kills
        for turn in range(options.kills):
            while done < (turn + 0.5) * options.requests / options.kills:
                await asyncio.sleep(0.01)
            pids = [pid for pid in llm.process_ids if alive(pid)]
            if pids:
                os.kill(rng.choice(pids), signal.SIGKILL)
                kills += 1

    shooting = asyncio.create_task(killer())
    await asyncio.gather(*(client() for _ in range(options.clients)))
    await shooting
    print(f"{options.requests} requests, {kills:.0f} kills: {len(wrong)} went wrong, "
          f"{fetched:.0f} fetched their prompt, {aborted:.0f} were aborted, the slowest took "
          f"{slowest:.1f} s")  # fmt: skip
    for line in wrong[:10]:
        print(line)
    return len(wrong)


def prompts() -> list[list[int]]:
    """Return 20 prompts of 80 to 180 tokens."""
    rng = random.Random(7)
    return [[rng.randrange(5, 200) for _ in range(rng.randrange(80, 180))] for _ in range(20)]


def kill(options: argparse.Namespace) -> int:
    before = {*os.listdir("/dev/shm")}
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_tiny(Path(folder, "tiny"), "Qwen3ForCausalLM"))
        flags: dict[str, Any] = {
            "dtype": "float32", "block_size": 32, "max_model_len": 256, "cpu_threads": 1,
            "num_gpu_blocks_override": 256, "max_num_batched_tokens": 64,
        }  # fmt: skip
        with LLM(model, **flags) as llm:
            asked = [{"prompt_token_ids": tokens} for tokens in prompts()]
            outputs = llm.generate(asked, ONE.with_(max_tokens=8), use_tqdm=False)
        expected = [output.outputs[0].token_ids for output in outputs]
        llm = engine(model, (2, 2), **flags, cpu_bytes_to_use=1 << 23)
        pids = set(llm.process_ids)
        try:
            wrong = asyncio.run(under_fire(llm, options, expected))
            pids |= set(llm.process_ids)
        finally:
            llm.shutdown()
    left = [pid for pid in pids if alive(pid)]
    # What running processes map belongs to other servers of this machine.
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid()}
    others = shared_files(sorted(pids))
    new = {*os.listdir("/dev/shm")} - before
    shared = [name for name in new if "modulm" in name and f"/dev/shm/{name}" not in others]
    print(f"processes left: {left}; files left: {shared}")
    return int(bool(wrong or left or shared))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15.0, help="of streams without prompts")
    parser.add_argument("--budget", type=int, default=256, help="tokens per step")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    return kill(options) if options.kills else compare(options)


if __name__ == "__main__":
    sys.exit(main())
