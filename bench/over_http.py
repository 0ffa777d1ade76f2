"""Throughput over HTTP relative to offline: the same requests, each streamed to its own client.

    python bench/over_http.py MODEL [--requests 32] [--input 256] [--output 128] [--times 3]

The offline engine and the server alternate, each in its own process and alone on the machine;
clients and server share the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import time

import httpx
from start import free_port

OFFLINE = """
import json, sys, time
from modulm import LLM, SamplingParams
model, output, prompts = json.load(sys.stdin)
llm = LLM(model=model, kv_cache_memory_bytes=2 << 30, max_num_seqs=len(prompts),
          speculative="off")
params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
llm.generate([{"prompt_token_ids": prompts[0][:8]}], params, use_tqdm=False)
began = time.perf_counter()
llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
print(time.perf_counter() - began)
"""


def offline(model: str, prompts: list[list[int]], output: int) -> float:
    """Seconds to generate for all prompts in this process."""
    asked = json.dumps([model, output, prompts])
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE], input=asked, check=True, capture_output=True, text=True
    )
    return float(done.stdout.split()[-1])


async def stream(client: httpx.AsyncClient, prompt: list[int], output: int) -> int:
    """Stream one request; returns the number of events."""
    body = {"prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
    events = 0
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            events += line.startswith("data: {")
    return events


async def everybody(address: str, prompts: list[list[int]], output: int) -> float:
    """Seconds until all streams have ended."""
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get("/health")).status_code == 200:
                    break
            await asyncio.sleep(0.1)
        await stream(client, prompts[0][:8], output)
        began = time.perf_counter()
        await asyncio.gather(*(stream(client, prompt, output) for prompt in prompts))
        return time.perf_counter() - began


def online(model: str, prompts: list[list[int]], output: int) -> float:
    port = free_port()
    command = [sys.executable, "-m", "modulm", "serve", model, "--port", str(port)]
    command += ["--kv-cache-memory-bytes", str(2 << 30), "--max-num-seqs", str(len(prompts))]
    command += ["--speculative", "off"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return asyncio.run(everybody(f"http://127.0.0.1:{port}", prompts, output))
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input", type=int, default=256)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    numbers = random.Random(0)
    tokens = options.requests * options.output
    ratios = []
    for _ in range(options.times):
        prompts = [
            [numbers.randrange(10, 1000) for _ in range(options.input)]
            for _ in range(options.requests)
        ]
        alone = tokens / offline(options.model, prompts, options.output)
        served = tokens / online(options.model, prompts, options.output)
        ratios.append(served / alone)
        print(f"offline {alone:.1f} tokens/s, over HTTP {served:.1f}: {ratios[-1]:.3f}", flush=True)
    print(f"median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
