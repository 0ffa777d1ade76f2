"""A swap's cost: from a sleeping model to its first token, beside copying its weights once.

python bench/model_swap.py [--hidden 2048] [--layers 8] [--rounds 5]
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch

from modulm import LLM, SamplingParams
from modulm.testing.checkpoints import make_tiny


def main(options: argparse.Namespace) -> None:
    """Measure and print a table."""
    with tempfile.TemporaryDirectory(prefix="model-swap-") as folder:
        path = make_tiny(
            folder, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
            num_hidden_layers=options.layers, num_attention_heads=options.hidden // 128,
            num_key_value_heads=options.hidden // 128, dtype="bfloat16",
        )  # fmt: skip
        llm = LLM(str(path), enable_sleep_mode=True, kv_cache_memory_bytes=1 << 28)
        weights = llm.info.description.weight_bytes
        params = SamplingParams(temperature=0, max_tokens=1)
        llm.generate(["a"], params, use_tqdm=False)
        source = torch.ones(weights, dtype=torch.uint8)
        print(f"weights: {weights >> 20} MiB; the best of {options.rounds} rounds\n")
        print("| level | sleeping to first token (s) | copying the weights (s) | ratio |")
        print("|---|---|---|---|")
        for level in (1, 2):
            swaps, copies = [], []
            for _ in range(options.rounds):
                llm.sleep(level)
                began = time.monotonic()
                llm.wake_up()
                llm.generate(["a"], params, use_tqdm=False)
                swaps.append(time.monotonic() - began)
                began = time.monotonic()
                source.clone()
                copies.append(time.monotonic() - began)
            swap, copy = min(swaps), min(copies)
            print(f"| {level} | {swap:.3f} | {copy:.3f} | {swap / copy:.2f} |", flush=True)
        llm.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    main(parser.parse_args())
