"""Ratios between this tree and another one, measured in short alternating turns.

    python bench/before_after.py OTHER_TREE MODEL [--rounds 12]

Both trees (each with its own .venv) keep an engine, later a server, loaded, and one of the two runs
at a time. A pair of turns takes seconds, in alternating order, so a drift of the machine's speed
hits both sides. Reported per case: the median and quartiles of this tree's rate over the other's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from over_http import everybody
from start import free_port

#: Requests, input tokens and output tokens of one turn.
CASES = {"one stream": (1, 16, 33), "prompt": (1, 257, 1), "batch": (8, 64, 32)}

WORKER = """
import json, sys, time
from modulm import LLM, SamplingParams
llm = LLM(model=sys.argv[1], dtype="bfloat16", kv_cache_memory_bytes=1 << 30, max_num_seqs=8,
          speculative="off")
print("ready", flush=True)
for line in sys.stdin:
    prompts, output = json.loads(line)
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    began = time.perf_counter()
    llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
    print(time.perf_counter() - began, flush=True)
"""

Run = Callable[[list[list[int]], int], float]


def offline(tree: Path, model: str, stack: ExitStack) -> Run:
    """An engine of `tree` in a process of its own; a run returns seconds."""
    process = stack.enter_context(
        subprocess.Popen(
            [tree / ".venv/bin/python", "-c", WORKER, model],
            cwd=tree,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    )
    stack.callback(process.terminate)
    assert process.stdin
    assert process.stdout
    stdin, stdout = process.stdin, process.stdout
    while stdout.readline() != "ready\n":
        if process.poll() is not None:
            raise RuntimeError(f"the engine of {tree} did not start")

    def run(prompts: list[list[int]], output: int) -> float:
        stdin.write(json.dumps([prompts, output]) + "\n")
        stdin.flush()
        return float(stdout.readline())

    return run


def over_http(tree: Path, model: str, stack: ExitStack) -> Run:
    """A server of `tree`, with one streaming client per prompt; a run returns seconds."""
    port = free_port()
    command = [tree / ".venv/bin/python", "-m", "modulm", "serve", model, "--port", str(port)]
    command += ["--dtype", "bfloat16", "--kv-cache-memory-bytes", str(1 << 30)]
    command += ["--speculative", "off"]
    server = stack.enter_context(
        subprocess.Popen(
            [*command, "--max-num-seqs", "8"],
            cwd=tree,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    )
    stack.callback(server.terminate)
    address = f"http://127.0.0.1:{port}"
    return lambda prompts, output: asyncio.run(everybody(address, prompts, output))


def compare(kind: str, case: str, before: Run, after: Run, rounds: int) -> None:
    """Print the ratio of rates, after over before, of one case."""
    requests, length, output = CASES[case]
    numbers = random.Random(case)
    turns = []
    for turn in range(rounds + 1):
        prompts = [[numbers.randrange(10, 1000) for _ in range(length)] for _ in range(requests)]
        seconds = {run: run(prompts, output) for run in ([before, after][:: 1 - turn % 2 * 2])}
        if turn:  # the first turn warms up
            turns.append((seconds[before], seconds[after]))
        time.sleep(0.2)
    low, middle, high = statistics.quantiles([old / new for old, new in turns], n=4)
    olds, news = zip(*turns, strict=True)
    print(
        f"{kind}, {case}: before {statistics.median(olds):.2f} s, after "
        f"{statistics.median(news):.2f} s; ratio of rates {middle:.3f} ({low:.3f}-{high:.3f}), "
        f"of the best turns {min(olds) / min(news):.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the tree before, with a .venv")
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    trees = [options.other.resolve(), Path(__file__).resolve().parents[1]]
    for kind, start in (("offline", offline), ("over HTTP", over_http)):
        with ExitStack() as stack:
            before, after = (start(tree, options.model, stack) for tree in trees)
            for case in CASES:
                compare(kind, case, before, after, options.rounds)


if __name__ == "__main__":
    main()
