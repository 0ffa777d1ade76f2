"""Ratios between this tree and another one, measured in short alternating turns.

    python bench/before_after.py OTHER_TREE MODEL [--rounds 12]
    python bench/before_after.py OTHER_TREE MODEL --offline --flags '{"quantization": "int4"}' \\
        --cases "one stream=1,32,26" "16 streams=16,32,18" "prompt=1,2048,1"

Both trees (each with its own .venv) keep an engine, later a server, loaded, and one of the two runs
at a time. A pair of turns takes seconds, in alternating order, so a drift of the machine's speed
hits both sides. Reported per case: seconds of both trees, and this tree's rate over the other's, as
quartiles.

A case is NAME=REQUESTS,INPUT,OUTPUT, in tokens. Offline, an output of more than two tokens counts
without the prompt: the time of two tokens, in a run of its own, is subtracted. A run before both
leaves the prompt in the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from over_http import everybody
from start import free_port

#: Requests, input tokens and output tokens of one turn.
Case = tuple[int, int, int]
CASES: dict[str, Case] = {"one stream": (1, 16, 33), "prompt": (1, 257, 1), "batch": (8, 64, 32)}

WORKER = """
import json, sys, time
from modulm import LLM, SamplingParams
flags = dict(dtype="bfloat16", kv_cache_memory_bytes=1 << 30, max_num_seqs=8)
llm = LLM(model=sys.argv[1], **flags | json.loads(sys.argv[2]))
print("ready", flush=True)
for line in sys.stdin:
    prompts, output = json.loads(line)
    times = [0.0]
    for tokens in (2, 2, output) if output > 2 else (output,):
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
        times.append(time.perf_counter() - began)
    print(times[-1] - (times[-2] if output > 2 else 0), flush=True)
"""

Run = Callable[[list[list[int]], int], float]


def offline(tree: Path, model: str, flags: str, stack: ExitStack) -> Run:
    """An engine of `tree` in a process of its own; a run returns seconds. flags: JSON."""
    process = stack.enter_context(
        subprocess.Popen(
            [tree / ".venv/bin/python", "-c", WORKER, model, flags],
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


def compare(kind: str, name: str, case: Case, before: Run, after: Run, rounds: int) -> None:
    """Print the ratio of rates, after over before, of one case."""
    requests, length, output = case
    numbers = random.Random(name)
    turns = []
    for turn in range(rounds + 1):
        prompts = [[numbers.randrange(10, 1000) for _ in range(length)] for _ in range(requests)]
        seconds = {run: run(prompts, output) for run in ([before, after][:: 1 - turn % 2 * 2])}
        if turn:  # the first turn warms up
            turns.append((seconds[before], seconds[after]))
        time.sleep(0.2)
    olds, news = zip(*turns, strict=True)
    print(
        f"{kind}, {name}: before {quartiles(olds)} s, after {quartiles(news)} s; ratio of rates "
        f"{quartiles([old / new for old, new in turns])}, of the best turns "
        f"{min(olds) / min(news):.3f}",
        flush=True,
    )


def quartiles(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def read_case(text: str) -> tuple[str, Case]:
    name, _, numbers = text.rpartition("=")
    requests, length, output = map(int, numbers.split(","))
    return name, (requests, length, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the tree before, with a .venv")
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--cases", type=read_case, nargs="+", default=[*CASES.items()])
    parser.add_argument("--offline", action="store_true", help="without servers")
    parser.add_argument("--flags", default='{"speculative": "off"}', help="of engines, as JSON")
    parser.add_argument("--flags-before", help="of the other tree's engine; default: --flags")
    options = parser.parse_args()
    other, this = options.other.resolve(), Path(__file__).resolve().parents[1]
    flags = options.flags_before or options.flags
    with ExitStack() as stack:
        before = offline(other, options.model, flags, stack)
        after = offline(this, options.model, options.flags, stack)
        for name, case in options.cases:
            compare("offline", name, case, before, after, options.rounds)
    if options.offline:
        return
    with ExitStack() as stack:
        before, after = (over_http(tree, options.model, stack) for tree in (other, this))
        for name, case in options.cases:
            compare("over HTTP", name, case, before, after, options.rounds)


if __name__ == "__main__":
    main()
