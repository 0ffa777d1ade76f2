"""Gaps between tokens of running streams while adapters are loaded.

Streams of the base model run on an engine in a separate process; after a while, adapters are loaded
one after the other, reloaded, and put into slots by requests that name them.

    python bench/adapter_loading.py [--model demo] [--streams 4] [--rank 64] [--adapters 8]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from modulm import SamplingParams
from modulm.config import EngineConfig
from modulm.contracts.sampling import OutputKind
from modulm.loading import open_checkpoint
from modulm.plugins import manager
from modulm.testing.adapters import write_lora
from modulm_server.engine.adapters import Adapter
from modulm_server.engine.async_llm import AsyncLLM


def write(folder: Path, model: str, rank: int, count: int) -> list[Path]:
    """Write adapters of all attention and feed-forward layers of a Llama-like checkpoint."""
    table = open_checkpoint(EngineConfig.from_keywords(model=model), manager.current()).config
    hidden, inner = table["hidden_size"], table["intermediate_size"]
    size = table.get("head_dim") or hidden // table["num_attention_heads"]
    queries, keys = size * table["num_attention_heads"], size * table["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, queries), "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys), "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    modules = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(table["num_hidden_layers"])
        for name, shape in shapes.items()
    }
    return [write_lora(folder / f"a{n}", modules, rank, n, lora_alpha=1) for n in range(count)]


async def ticking(engine: AsyncLLM, name: str, gaps: list[tuple[float, float]]) -> None:
    """Record (time, seconds since the previous token) of an endless stream of the base model."""
    params = SamplingParams(
        temperature=0, max_tokens=1900, ignore_eos=True, output_kind=OutputKind.DELTA
    )
    last: float | None = None
    async for _ in engine.generate("Once", params, name):
        now = time.perf_counter()
        if last is not None:
            gaps.append((now, now - last))
        last = now


async def measure(engine: AsyncLLM, paths: list[Path], streams: int) -> None:
    gaps: list[tuple[float, float]] = []
    running = [asyncio.create_task(ticking(engine, f"s{n}", gaps)) for n in range(streams)]
    marks = [("nothing beside", time.perf_counter())]
    await asyncio.sleep(3)
    marks.append(("loading", time.perf_counter()))
    for replace in (False, True):
        for path in paths:
            adapter = Adapter(path.name, str(path))
            await asyncio.wrap_future(engine.load_adapter(adapter, replace=replace))
    loaded = time.perf_counter()
    one = SamplingParams(max_tokens=1, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
    marks.append(("first use", loaded))
    for path in paths:
        async for _ in engine.generate("x", one, f"use {path.name}", adapter=path.name):
            pass
    end = time.perf_counter()
    for task in running:
        task.cancel()
    print(f"{2 * len(paths)} loads in {loaded - marks[1][1]:.2f} s")
    for (what, begin), until in zip(marks, [*(mark for _, mark in marks[1:]), end], strict=True):
        found = [1e3 * gap for moment, gap in gaps if begin < moment <= until]
        middle, most = statistics.median(found), max(found)
        print(f"{what:15} {len(found):6} gaps: median {middle:6.2f} ms, longest {most:7.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = write(Path(folder), options.model, options.rank, options.adapters)
        engine = AsyncLLM(
            options.model, enable_lora=True, max_loras=2, max_lora_rank=options.rank,
            max_num_seqs=16,
        )  # fmt: skip
        try:
            asyncio.run(measure(engine, paths, options.streams))
        finally:
            engine.shutdown()


if __name__ == "__main__":
    main()
