"""A swap's cost: from a sleeping model to its first token, beside copying its weights once.

python bench/model_swap.py [--hidden 2048] [--layers 8] [--rounds 5] [--weights-memory mmap]

Both as time, and as CPU time, which other programs of the machine change less.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import numpy as np
import torch

from modulm import LLM, SamplingParams
from modulm.testing.checkpoints import make_tiny


def now() -> np.ndarray:
    """Time and CPU time of this process, in seconds."""
    return np.array([time.monotonic(), time.process_time()])


def main(options: argparse.Namespace) -> None:
    """Measure and print a table."""
    with tempfile.TemporaryDirectory(prefix="model-swap-") as folder:
        path = make_tiny(
            folder, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
            num_hidden_layers=options.layers, num_attention_heads=options.hidden // 128,
            num_key_value_heads=options.hidden // 128, dtype="bfloat16",
        )  # fmt: skip
        llm = LLM(
            str(path), enable_sleep_mode=True, kv_cache_memory_bytes=1 << 28,
            weights_memory=options.weights_memory, weights_cache_dir=f"{folder}/packed",
        )  # fmt: skip
        weights = llm.info.description.weight_bytes
        params = SamplingParams(temperature=0, max_tokens=1)
        llm.generate(["a"], params, use_tqdm=False)
        source = torch.ones(weights, dtype=torch.uint8)
        print(f"weights: {weights >> 20} MiB; the best of {options.rounds} rounds\n")
        print("| level | sleeping to first token (s) | copying the weights (s) | ratio "
              "| CPU: swap (s) | copy (s) | ratio |")  # fmt: skip
        print("|---|---|---|---|---|---|---|")
        for level in (1, 2):
            swaps, copies = [], []
            for _ in range(options.rounds):
                llm.sleep(level)
                began = now()
                llm.wake_up()
                llm.generate(["a"], params, use_tqdm=False)
                swaps.append(now() - began)
                began = now()
                source.clone()
                copies.append(now() - began)
            (swap, swap_cpu), (copy, copy_cpu) = np.min(swaps, axis=0), np.min(copies, axis=0)
            print(f"| {level} | {swap:.3f} | {copy:.3f} | {swap / copy:.2f} "
                  f"| {swap_cpu:.3f} | {copy_cpu:.3f} | {swap_cpu / copy_cpu:.2f} |",
                  flush=True)  # fmt: skip
        llm.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--weights-memory", choices=("private", "mmap"), default="private")
    parser.add_argument("--rounds", type=int, default=5)
    main(parser.parse_args())
