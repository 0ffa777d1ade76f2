"""KV cache tiers: what a prefix costs from each tier, and what saving costs.

    python bench/kv_tiers.py [--layers 28] [--times 5] [--conversations 100] [--pool 20] [--turns 3]
    python bench/kv_tiers.py --times 3 --conversations 10 --pool 2 --turns 1    # in 6 minutes

A model of Qwen3-0.6B's shape with random weights, in one process. Prints, as ratios within the run:

prefix         time to the first token of a prompt of 2,048 stored tokens and 16 new ones, over that
               of computing it: from host memory, from files, from files after a restart
saving         tokens per second of new prompts with saving on, over those without a tier
conversations  tokens per second of conversations of 4,096 tokens that take turns in a pool for a
               fifth of them, over those without a tier

Exits with 1 if a ratio is beyond its limit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from weight_update import SHAPE

from modulm import LLM, SamplingParams
from modulm.testing.checkpoints import make_tiny

#: Limits: at most these parts of computing a prefix, at least these parts of the tokens per second.
HOST, FILES, RESTART = 0.05, 0.08, 0.12
SAVING, CONVERSATIONS = 0.97, 5.0
PREFIX, NEW, CONVERSATION = 2048, 16, 4096
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
SOME = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
MODEL: dict[str, Any] = {"dtype": "bfloat16", "block_size": 16, "max_model_len": CONVERSATION + 512}


def host(size: int = 8 << 30) -> dict[str, Any]:
    return {"kv_offloading_size": size / (1 << 30)}


def files(folder: str) -> dict[str, Any]:
    extra = {"shared_storage_path": folder, "max_bytes": 64 << 30}
    return {"kv_transfer_config": {"kv_connector": "disk", "kv_connector_extra_config": extra}}


@contextmanager
def engine(model: str, tier: dict[str, Any], pool: int = 3) -> Iterator[LLM]:
    """An engine whose pool has room for that many conversations."""
    blocks = pool * (CONVERSATION + 64) // MODEL["block_size"] + 1
    with LLM(model, **MODEL, **tier, num_gpu_blocks_override=blocks) as llm:
        run(llm, [tokens(0, 64)])  # the first step allocates
        for cache in llm._core.executor._worker.runner.builder.caches:
            cache.zero_()  # a server that has run for a while has touched all of its memory
        yield llm


def tokens(seed: int, count: int) -> list[int]:
    """Tokens that no other seed gives."""
    drawn: list[int] = np.random.default_rng(seed).integers(10, 100_000, count).tolist()
    return drawn


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams = ONE) -> tuple[float, int]:
    """Return the seconds that the prompts took together, and how many tokens were cached."""
    began = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return seconds, sum(output.num_cached_tokens or 0 for output in outputs)


def settle(llm: LLM) -> None:
    """Let all saves end."""
    while llm._core.loop.tick():
        pass


def first_token(llm: LLM, seed: int, new: int, *, stored: bool) -> float:
    """Return the seconds to the first token of a prefix and `new` as the seed of what follows it.

    Raises RuntimeError if the prefix was not, or was, computed.
    """
    seconds, cached = run(llm, [tokens(seed, PREFIX) + tokens(10_000 + new, NEW)])
    if (cached >= PREFIX) != stored:
        raise RuntimeError(f"{cached} tokens were cached")
    return seconds


def measure_prefix(model: str, times: int) -> Iterator[tuple[str, float, float]]:
    """Yield (what, seconds, limit as a part of the first), computing first."""
    with tempfile.TemporaryDirectory(prefix="modulm-kv-") as folder:
        for name, tier, limit in (("host memory", host(), HOST), ("files", files(folder), FILES)):
            computed, loaded = [], []
            with engine(model, tier) as llm:
                for number in range(times):
                    computed.append(first_token(llm, 1 + number, 0, stored=False))
                    settle(llm)
                    llm.reset_prefix_cache()
                    loaded.append(first_token(llm, 1 + number, 1 + number, stored=True))
                    llm.reset_prefix_cache()
            yield name, median(loaded) / median(computed), limit
        with engine(model, files(folder)) as llm:
            again = [first_token(llm, 1 + number, 500 + number, stored=True)
                     for number in range(times)]  # fmt: skip
        yield "files after a restart", median(again) / median(computed), RESTART


def measure_saving(model: str, times: int) -> Iterator[tuple[str, float, float]]:
    """New prompts of 1,024 tokens, eight at a time, in turns of both engines."""
    with (
        tempfile.TemporaryDirectory(prefix="modulm-kv-") as folder,
        engine(model, {}) as plain,
        engine(model, host()) as saving,
        engine(model, files(folder)) as filing,
    ):
        engines = {"none": plain, "host memory": saving, "files": filing}
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(times):
            prompts = [tokens(1000 * number + i, 1024) for i in range(8)]
            for name, llm in engines.items():
                began = time.perf_counter()
                run(llm, prompts, SOME)
                settle(llm)
                seconds[name].append(time.perf_counter() - began)
        for name in ("host memory", "files"):
            yield name, median(seconds["none"]) / median(seconds[name]), SAVING


def measure_conversations(
    model: str, count: int, pool: int, turns: int
) -> Iterator[tuple[str, float, float]]:
    """Conversations take turns: each adds 32 tokens to all before it, and gets 16."""
    rates = {}
    for name, tier in (("none", {}), ("host memory", host(12 << 30))):
        with engine(model, tier, pool) as llm:
            texts = [tokens(number, CONVERSATION - 48 * turns) for number in range(count)]
            # Without a tier, a conversation is gone when its turn comes, computed before or not.
            for text in texts if tier else ():
                run(llm, [text])
            settle(llm)
            began, produced = time.perf_counter(), 0
            for turn in range(turns):
                for number, text in enumerate(texts):
                    text.extend(tokens(100_000 + turn * count + number, 32))
                    prompt = {"prompt_token_ids": text}
                    (output,) = llm.generate([prompt], SOME, use_tqdm=False)
                    text.extend(output.outputs[0].token_ids)
                    produced += len(output.outputs[0].token_ids)
            rates[name] = produced / (time.perf_counter() - began)
    yield "host memory", rates["host memory"] / rates["none"], CONVERSATIONS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--pool", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    parts: dict[str, tuple[Callable[[str], Iterator[tuple[str, float, float]]], bool]] = {
        "prefix": (lambda model: measure_prefix(model, options.times), True),
        "saving": (lambda model: measure_saving(model, options.times), False),
        "conversations": (
            lambda model: measure_conversations(
                model, options.conversations, options.pool, options.turns
            ),
            False,
        ),
    }
    beyond = False
    with tempfile.TemporaryDirectory(prefix="modulm-tiers-") as folder:
        shape = {**SHAPE, "num_hidden_layers": options.layers, "max_position_embeddings": 8192}
        model = str(make_tiny(Path(folder), "Qwen3ForCausalLM", **shape))
        for part, (measure, at_most) in parts.items():
            for name, ratio, limit in measure(model):
                wrong = ratio > limit if at_most else ratio < limit
                sign = "at most" if at_most else "at least"
                verdict = "  BEYOND THE LIMIT" if wrong else ""
                print(f"{part:<14} {name:<22} {ratio:6.3f}  ({sign} {limit}){verdict}", flush=True)
                beyond |= wrong
    return int(beyond)


if __name__ == "__main__":
    sys.exit(main())
