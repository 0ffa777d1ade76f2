"""How the CPU time of a step or a request grows with each size, with slopes and plots.

    python bench/growth.py [--full] [--only rows waiting ...] [--plots FOLDER] [--json FILE]

For each size the smallest of several measurements in CPU seconds of this process is taken, so that
other load matters little. The slope is fitted to logarithms over the larger half of the sizes: 1 is
linear, 0 constant. Without `--full` sizes end where a measurement takes about a second.

| name | unit | size |
|---|---|---|
| rows | a step | running rows |
| blocks | a step of 32 rows | blocks in the pool |
| waiting | a step of 8 rows | waiting requests |
| arrivals | adding a request | waiting requests |
| memory | bytes of a waiting request, without its prompt | waiting requests |
| prefixes | admission of a request | blocks in the prefix index |
| entries | bytes of a block in the prefix index, with its place in the pool | blocks in the index |
| stops | a token | stop strings |
| tools | rendering a request | tools |
| messages | rendering and tokenizing a request | messages |
| tokenizing | a prompt | tokens |
| hashing | a prompt: names of its blocks | tokens |
| scheduling | a prompt, from arrival to its last chunk | tokens |
| grammars | compiling one more, then finding it | known grammars |
| packages | listing plugins in a new process | installed packages |
| adapters | a request that names one, from its bytes to its answer | known adapters |
| models | reading a `--models-dir` | its folders |
| streams | a token of a stream over HTTP, requests included | streams at once |
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from harness import Held

from modulm.config import EngineConfig
from modulm.contracts.executor import Capacity, GroupCapacity, Plan, StepResult
from modulm.contracts.requests import Request
from modulm.contracts.sampling import SamplingParams, StructuredOutputs
from modulm.engine.kv_cache.prefix_index import Chain, hasher
from modulm.engine.scheduling.limits import Limits
from modulm.engine.scheduling.scheduler import BudgetScheduler
from modulm.plugins import manager
from modulm_chat import encode_chat, execute, render
from modulm_demo import Demo
from modulm_frontend.stops import StopScanner
from modulm_server.app import create_app
from modulm_server.engine.adapters import Adapter
from modulm_server.models.settings import read_settings
from modulm_server.scripted import Reply, ScriptedEngine, scripted_info
from modulm_structured_output.compiler import GrammarCompiler
from modulm_tokenizers.tokenizer import load_tokenizer

#: Name -> (sizes, larger sizes with --full).
SIZES: dict[str, tuple[list[int], list[int]]] = {
    "rows": ([1, 16, 256, 1024, 4096], []),
    "blocks": ([1_000, 10_000, 100_000, 1_000_000], [10_000_000]),
    "waiting": ([1, 100, 1_000, 10_000], [100_000]),
    "arrivals": ([1, 100, 1_000, 10_000], [100_000]),
    "memory": ([100, 1_000, 10_000], [100_000]),
    "prefixes": ([1_000, 10_000, 100_000], [1_000_000, 10_000_000]),
    "entries": ([100_000], [1_000_000, 10_000_000]),
    "stops": ([1, 10, 100, 1_000], []),
    "tools": ([1, 10, 100, 1_000], []),
    "messages": ([1, 10, 100, 1_000], [10_000]),
    "tokenizing": ([1_000, 10_000, 100_000], [1_000_000]),
    "hashing": ([1_000, 10_000, 100_000, 1_000_000], []),
    "scheduling": ([1_000, 10_000, 100_000], [1_000_000]),
    "grammars": ([1, 10, 100], [1_000]),
    "packages": ([200, 500, 1_000], [2_000]),
    "adapters": ([1, 10, 100, 1_000, 10_000], []),
    "models": ([1, 10, 100, 1_000], [10_000]),
    "streams": ([1, 10, 100, 1_000], [10_000]),
}
BLOCK = 16


#: Tokens of each stream.
STREAMED = 32


def cpu(work: Callable[[], Any], repeats: int = 3) -> float:
    """The smallest CPU time of a call, in seconds."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def scheduler(rows: int, blocks: int, tokens: int = 1 << 16, longest: int = 4096) -> Any:
    capacity = Capacity((GroupCapacity("attention", BLOCK, None, blocks),), 32_000, longest)
    policy = manager.current().load("schedulers", "fcfs")()
    return BudgetScheduler(Limits(rows=rows, tokens=tokens), capacity, policy)


def request(name: str, tokens: int, seed: int = 0, new: int = 400) -> Request:
    prompt = np.random.default_rng(seed).integers(10, 30_000, tokens)
    params = SamplingParams(temperature=0, max_tokens=new)
    return Request(id=name, prompt=prompt, params=params, eos=(2,))


def step(made: Any) -> Plan:
    """Plan a step and commit the result of a model that costs nothing."""
    plan = made.plan()
    made.commit(plan, StepResult(plan.step, np.full(int(plan.samples.sum()), 7)))
    return plan


def per_step(made: Any, steps: int = 60) -> float:
    for _ in range(20):
        step(made)
    return cpu(lambda: [step(made) for _ in range(steps)], 5) / steps


def rows(size: int) -> float:
    made = scheduler(size, size * 40 + 1)
    for index in range(size):
        made.add(request(f"r{index}", 16, index))
    return per_step(made)


def blocks(size: int) -> float:
    made = scheduler(32, max(size, 32 * 31))
    for index in range(32):
        made.add(request(f"r{index}", 16, index))
    return per_step(made)


def queue(size: int, memory: bool = False) -> tuple[Any, float]:
    """A scheduler with 8 running and `size` waiting requests, and the bytes of one of these."""
    made = scheduler(8, 8 * 40 + 1)
    prompt = np.arange(10, 26)
    params = SamplingParams(temperature=0, max_tokens=400)
    for index in range(8):
        made.add(request(f"r{index}", 16, index))
    step(made)
    if memory:
        tracemalloc.start()
    for index in range(size):
        made.add(Request(id=f"w{index}", prompt=prompt, params=params, eos=(2,)))
    used = tracemalloc.get_traced_memory()[0] / size if memory else 0.0
    tracemalloc.stop()
    return made, used


def waiting(size: int) -> float:
    return per_step(queue(size)[0])


def arrivals(size: int) -> float:
    made, _ = queue(size)
    more = [request(f"m{index}", 16, index) for index in range(300)]
    began = time.process_time()
    for each in more:
        made.add(each)
    return (time.process_time() - began) / len(more)


def memory(size: int) -> float:
    return queue(size, memory=True)[1]


#: Tokens of the prompts that fill a prefix index.
INDEXED = 32 * BLOCK


def indexed(size: int) -> Any:
    """A scheduler whose prefix index has the blocks of ended requests."""
    made = scheduler(8, size + 8 * 40)
    for index in range(max(size // 32, 1)):
        made.add(request(f"p{index}", INDEXED, index, new=1))
        step(made)
    return made


def prefixes(size: int) -> float:
    """Admit requests of which half is known."""
    made = indexed(size)
    more = [
        request(f"m{index}", INDEXED, index if index % 2 else 10**6 + index, 1)
        for index in range(60)
    ]
    began = time.process_time()
    for each in more:
        made.add(each)
        step(made)
    return (time.process_time() - began) / len(more)


def entries(size: int) -> float:
    before = Held.by([os.getpid()]).memory
    made = indexed(size)
    used = Held.by([os.getpid()]).memory - before
    del made
    return used * 1024 / size


def stops(size: int) -> float:
    scanner = StopScanner([f"<end of part {index}>" for index in range(size)])
    pieces = ["some", " words", " of a", " text."] * 50
    return cpu(lambda: [scanner.feed(piece) for piece in pieces]) / len(pieces)


@cache
def tokenizer() -> Any:
    return load_tokenizer(Demo.source())


def tools(size: int) -> float:
    each = [
        {"type": "function", "function": {
            "name": f"tool_{index}", "description": "Look something up.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        }}
        for index in range(size)
    ]  # fmt: skip
    messages = [{"role": "user", "content": "Hello"}]
    return cpu(lambda: render(messages, tokenizer=tokenizer(), tools=each, run=execute))


def messages(size: int) -> float:
    conversation = [
        {"role": "assistant" if index % 2 else "user", "content": f"This is message {index}."}
        for index in range(size)
    ]
    return cpu(lambda: encode_chat(conversation, tokenizer=tokenizer(), run=execute))


def tokenizing(size: int) -> float:
    words = ["the", " river", " of", " a", " small", " town", " in", " 1984", ".", " Then", " we"]
    draw = np.random.default_rng(0)
    text = "".join(words[index] for index in draw.integers(0, len(words), size))
    return cpu(lambda: tokenizer().encode(text))


def hashing(size: int) -> float:
    each = request("a", size)
    return cpu(lambda: Chain(each, BLOCK, hasher("sha256")).extend(each.prompt.astype(np.int32)))


def scheduling(size: int) -> float:
    def run() -> None:
        made = scheduler(4, size // BLOCK + 64, tokens=2048, longest=size + 64)
        made.add(request("a", size, new=2))
        while made.busy:
            step(made)

    return cpu(run, 2)


def grammars(size: int) -> float:
    """Compile `size` schemas, then measure one more and 100 that are known."""
    backend = manager.current().load("grammars", "xgrammar")(
        tokenizer(), 8192, tokenizer().stop_ids
    )
    compiler = GrammarCompiler([backend], workers=1)

    def schema(index: int) -> StructuredOutputs:
        return StructuredOutputs(choice=[f"answer {index}", f"other {index}"])

    for index in range(size):
        compiler(schema(index)).result(30)
    began = time.process_time()
    compiler(schema(size)).result(30)
    for index in range(100):
        compiler(schema(max(size - index, 0))).result(30)
    return time.process_time() - began


def packages(size: int) -> float:
    """List plugins in a new process whose path has `size` more packages without any."""
    script = (
        "import time; began = time.process_time()\n"
        "from modulm.plugins import manager; manager.current().everything()\n"
        "print(time.process_time() - began)"
    )
    with tempfile.TemporaryDirectory() as folder:
        for index in range(size):
            info = Path(folder) / f"package_{index}-1.0.dist-info"
            info.mkdir()
            text = f"Metadata-Version: 2.1\nName: package-{index}\nVersion: 1.0\n"
            (info / "METADATA").write_text(text)
            (info / "entry_points.txt").write_text(f"[console_scripts]\nc{index} = m:f\n")
        command = [sys.executable, "-c", f"import sys; sys.path.append({folder!r})\n{script}"]
        return min(float(subprocess.check_output(command)) for _ in range(3))


def scripted_app(reply: Reply) -> tuple[ScriptedEngine, Any]:
    """A server's application whose engine gives this answer at once."""
    info = scripted_info(tokenizer(), max_model_len=4096, parts={"adapters": {"slots": 4}})
    engine = ScriptedEngine(tokenizer(), lambda prompt, params: reply, info)
    return engine, create_app(engine, EngineConfig.from_keywords(model="M")).app


def adapters(size: int) -> float:
    engine, app = scripted_app(Reply("1 2"))
    for index in range(size):
        engine.load_adapter(Adapter(f"adapter-{index}", f"/adapters/{index}")).result()

    async def run() -> float:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"model": f"adapter-{size // 2}", "prompt": "Hello", "max_tokens": 2}
            times = []
            for _ in range(30):
                began = time.process_time()
                (await client.post("/v1/completions", json=body)).raise_for_status()
                times.append(time.process_time() - began)
            return min(times)

    return asyncio.run(run())


def models(size: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        for index in range(size):
            checkpoint = Path(folder) / f"model-{index}"
            checkpoint.mkdir()
            (checkpoint / "config.json").write_text("{}")
        config = EngineConfig.from_keywords(model="M", models_dir=folder)
        return cpu(lambda: read_settings(config, ()))


def streams(size: int) -> float:
    """CPU time of the server's process alone: another one reads the streams."""
    app = scripted_app(Reply("1 2 3 4 ", endless=True))[1]
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", backlog=1024))

    async def run() -> float:
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        times = []
        for _ in range(3 if size < 1_000 else 1):
            began = time.process_time()
            client = await asyncio.create_subprocess_exec(
                sys.executable, str(Path(__file__).with_name("streams.py")), "--port", str(port),
                "--streams", str(size), "--tokens", str(STREAMED), stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            said, _ = await client.communicate()
            times.append(time.process_time() - began)
            if f"complete {size}\n".encode() not in said:
                raise SystemExit(f"{size} streams: {said.decode()}")
        server.should_exit = True
        await serving
        return min(times) / (size * STREAMED)

    return asyncio.run(run())


def slope(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Fit the exponent of the growth over the larger half of the sizes."""
    first = len(sizes) // 2 - (len(sizes) < 4)
    x, y = np.log(sizes[first:]), np.log(np.maximum(costs[first:], 1e-9))
    return float(np.polyfit(x, y, 1)[0])


def plot(name: str, sizes: Sequence[int], costs: Sequence[float], fitted: float, unit: str) -> str:
    """Return an SVG with logarithmic axes and a line of slope 1."""
    width, height, edge = 320, 220, 44
    low, high = math.log10(sizes[0]), math.log10(sizes[-1])
    bottom = math.floor(math.log10(max(min(costs), 1e-9)))
    top = max(math.ceil(math.log10(max(costs))), bottom + 1)

    def at(size: float, cost: float) -> str:
        x = edge + (math.log10(size) - low) / (high - low) * (width - edge - 16)
        share = (math.log10(max(cost, 1e-9)) - bottom) / (top - bottom)
        return f"{x:.1f},{height - edge - share * (height - edge - 30):.1f}"

    points = [at(*pair) for pair in zip(sizes, costs, strict=True)]
    guide = [at(size, costs[-1] * size / sizes[-1]) for size in sizes]
    guide = [point for point in guide if float(point.split(",")[1]) < height - edge]
    base = height - edge
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        '<g font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{edge}" y="16" font-size="13">{name}: slope {fitted:.2f}</text>',
        f'<path d="M{edge} 26V{base}H{width - 12}" fill="none" stroke="black"/>',
        f'<text x="{edge}" y="{height - 12}">{sizes[0]:,} to {sizes[-1]:,}</text>',
        f'<text x="4" y="{base}">1e{bottom}</text><text x="4" y="36">1e{top} {unit}</text>',
        f'<polyline points="{" ".join(guide)}" fill="none" stroke="gray" stroke-dasharray="4"/>',
        f'<polyline points="{" ".join(points)}" fill="none" stroke="#1b6ca8"/>',
        *(f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="3" fill="#1b6ca8"/>'
          for p in points),
        "</g></svg>",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--plots", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table: dict[str, Any] = {}
    print("| cost | slope | at each size |\n|---|---:|---|")
    for name in options.only:
        sizes = SIZES[name][0] + (SIZES[name][1] if options.full else [])
        costs = [globals()[name](size) for size in sizes]
        fitted = slope(sizes, costs)
        table[name] = {"sizes": sizes, "costs": costs, "slope": fitted}
        unit, scale = ("B", 1.0) if name in ("memory", "entries") else ("us", 1e6)
        scaled = [cost * scale for cost in costs]
        each = ", ".join(f"{size:,}: {cost:,.1f}" for size, cost in zip(sizes, scaled, strict=True))
        print(f"| {name}, {unit} | {fitted:.2f} | {each} |", flush=True)
        if options.plots:
            (options.plots / f"growth-{name}.svg").write_text(
                plot(name, sizes, scaled, fitted, unit) + "\n"
            )
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
