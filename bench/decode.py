"""Where the time of steps goes: single streams, a full batch, a prompt, and a long context.

    python bench/decode.py MODEL [--quantization int8] [--only NAME ...] [--json FILE]
    python bench/decode.py MODEL --long 32768 --kv-cache-dtype int8 --hf-overrides '{...}'

Each figure is compared with the machine's peak: the bytes that a step reads with the read
bandwidth, the operations of a prompt with the rate of a bf16 product. Both are measured just before
and just after, since other load on the host changes them. --long is --prompts prompts of that many
tokens and --rounds times one stream after the last; every figure is printed once it is known.
Random weights in fewer layers, or with fewer heads, shorten it. 128k takes a minute with

    --long 131072 --hf-overrides '{"num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 32000}'
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, TypeVar

import numpy as np
from probe import gemm_rate

import modulm_kernels_cpu as kernels
from modulm import LLM, SamplingParams
from modulm_kernels_cpu.probe import read_bandwidth

T = TypeVar("T")

_RANDOM = np.random.default_rng(0)


#: Bytes per weight, including scales and zero points; int4 keeps the head in int8.
BYTES = {None: 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 64}


class Sizes:
    """The cost of a step of a dense model: bytes of weights, bytes of KV per token of context."""

    def __init__(
        self, config: Mapping[str, Any], quantization: str | None, cache_dtype: str = "auto"
    ) -> None:
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        size = config.get("head_dim") or hidden // heads
        attention = hidden * size * (2 * heads + 2 * kv_heads)
        gated = 3 * hidden * config["intermediate_size"]
        self.products = layers * (attention + gated)
        self.left_out = hidden * size * heads + gated  # of the last layer, where nobody samples
        each = BYTES[quantization]
        head = hidden * config["vocab_size"] * (1.0 if quantization == "int4" else each)
        self.weights = self.products * each + head
        self.heads = layers * heads * size
        one = size + 4 if cache_dtype == "int8" else size * (1 if "8" in cache_dtype else 2)
        self.kv = 2 * layers * kv_heads * one

    def prompt_flops(self, tokens: int, computed: bool = False) -> float:
        """FLOPs of a prompt: the linear layers, and causal attention.

        computed: without what the engine leaves out in the last layer; of few layers that is a lot.
        """
        products = self.products - (self.left_out if computed else 0)
        return 2.0 * products * tokens + 2.0 * self.heads * tokens * tokens


def prompt(tokens: int) -> list[int]:
    """Token ids that share no prefix with other prompts."""
    return [int(token) for token in _RANDOM.integers(1000, 30000, tokens)]


def seconds(llm: LLM, prompts: list[list[int]], tokens: int) -> float:
    """Time generating exactly `tokens` tokens for each prompt."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


def per_step(llm: LLM, ids: list[int], steps: int) -> float:
    """Seconds per step of one stream after a cached prompt, so that only decoding is timed."""
    more, fewer = (min(seconds(llm, [ids], n) for _ in range(3)) for n in (steps + 2, 2))
    return (more - fewer) / steps


def beside(measure: Callable[[], float], figure: Callable[[], T]) -> tuple[T, float]:
    """Return a figure, and the mean of the machine's peak before and after it."""
    before = measure()
    found = figure()
    return found, (before + measure()) / 2


def bandwidth() -> float:
    """Read bandwidth in GB/s."""
    return read_bandwidth(kernels.load())


def stream(llm: LLM, sizes: Sizes, context: int = 64, steps: int = 64) -> dict[str, float]:
    """One stream: bytes of weights and KV per second of a step, as a fraction of the bandwidth."""
    ids = prompt(context)
    seconds(llm, [ids], 1)
    step, possible = beside(bandwidth, lambda: per_step(llm, ids, steps))
    return stream_figures(sizes, step, possible, context + steps / 2)


def stream_figures(sizes: Sizes, step: float, possible: float, context: float) -> dict[str, float]:
    read = (sizes.weights + sizes.kv * context) / 1e9
    return {
        "tokens/s": 1 / step,
        "GB/s": read / step,
        "of GB/s": possible,
        "fraction": read / step / possible,
    }


def prefill(llm: LLM, sizes: Sizes, tokens: int = 2048) -> dict[str, float]:
    """A prompt, as a fraction of the rate of a large bf16 product: the best of both, and the means
    of both over seconds.
    """
    sustained = partial(gemm_rate, seconds=3.0, sustained=True)
    taken, mean = beside(sustained, lambda: [seconds(llm, [prompt(tokens)], 1) for _ in range(3)])
    possible = gemm_rate()
    done = sizes.prompt_flops(tokens) / 1e9
    return {
        "tokens/s": tokens / min(taken),
        "GFLOP/s": done / min(taken),
        "of GFLOP/s": possible,
        "fraction": done / min(taken) / possible,
        "sustained": done / fmean(taken) / mean,
    }


def long_context(
    llm: LLM, sizes: Sizes, tokens: int, prompts: int, rounds: int, steps: int = 8
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the figures of prompts and of streams after the last; then the fractions' quartiles."""
    found = defaultdict(list)
    ids = []
    for number in range(prompts):
        ids = prompt(tokens)
        taken, rate = beside(gemm_rate, lambda ids=ids: seconds(llm, [ids], 1))
        done = sizes.prompt_flops(tokens, computed=True) / 1e9
        figures = {
            "tokens/s": tokens / taken,
            "GFLOP/s": done / taken,
            "of GFLOP/s": rate,
            "fraction": done / taken / rate,
        }
        found["prompt"].append(figures["fraction"])
        yield f"prompt {number + 1} of {tokens}", figures
    for number in range(rounds):
        step, possible = beside(bandwidth, lambda: per_step(llm, ids, steps))
        figures = stream_figures(sizes, step, possible, tokens + steps / 2)
        found["stream"].append(figures["fraction"])
        yield f"stream {number + 1} after {tokens}", figures
    for name, fractions in found.items():
        if len(fractions) > 1:
            low, middle, high = quantiles(fractions, n=4, method="inclusive")
            yield f"{name}s, quartiles", {"lower": low, "median": middle, "upper": high}


def batch(llm: LLM, requests: int = 32, prompted: int = 256, tokens: int = 128) -> dict[str, float]:
    """Simultaneous requests: output tokens per second."""
    taken = seconds(llm, [prompt(prompted) for _ in range(requests)], tokens)
    return {"seconds": taken, "output tokens/s": requests * tokens / taken}


def cases(llm: LLM, sizes: Sizes) -> Mapping[str, Callable[[], dict[str, float]]]:
    """The benchmark's cases by name."""
    return {
        "stream": lambda: stream(llm, sizes),
        "prompt": lambda: prefill(llm, sizes),
        "batch": lambda: batch(llm),
        "context": lambda: stream(llm, sizes, context=8192, steps=24),
    }


def main() -> None:
    """Print a line for each case; write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--quantization")
    parser.add_argument("--eager", action="store_true", help="without recorded steps")
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--long", type=int, help="only a prompt of so many tokens and a stream")
    parser.add_argument("--rounds", type=int, default=1, help="of --long's stream")
    parser.add_argument("--prompts", type=int, default=1, help="of --long")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--hf-overrides", type=json.loads, default={}, help="with random weights")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    config = json.loads((Path(options.model) / "config.json").read_text())
    if (layers := options.hf_overrides.get("num_hidden_layers")) and config.get("layer_types"):
        options.hf_overrides.setdefault("layer_types", config["layer_types"][:layers])
    length = (options.long or 8192) + 800
    if options.hf_overrides:
        options.hf_overrides.setdefault("max_position_embeddings", length)
    config |= options.hf_overrides
    sizes = Sizes(config, options.quantization, options.kv_cache_dtype)
    llm = LLM(
        options.model, quantization=options.quantization, enforce_eager=options.eager,
        max_model_len=length, kv_cache_memory_bytes=max(2 << 30, int(sizes.kv * length * 1.1)),
        kv_cache_dtype=options.kv_cache_dtype, speculative="off",
        hf_overrides=options.hf_overrides,
        load_format="dummy" if options.hf_overrides else "auto",
    )  # fmt: skip
    seconds(llm, [prompt(64)], 8)
    found = {}
    if options.long:
        for name, figures in long_context(
            llm, sizes, options.long, options.prompts, options.rounds
        ):
            found[name] = figures
            described = (f"{value:.4g} {unit}" for unit, value in figures.items())
            print(name, *described, sep="  ", flush=True)
        options.only = []
    for name, measure in cases(llm, sizes).items():
        if options.only is None or name in options.only:
            found[name] = measure()
            figures = "  ".join(f"{value:.4g} {unit}" for unit, value in found[name].items())
            print(f"{name:8} {figures}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
