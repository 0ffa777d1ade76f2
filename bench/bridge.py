"""The transformers bridge beside the native model: python bench/bridge.py FOLDER [--rounds 8]

Writes a random bf16 checkpoint of Qwen3-0.6B's shape to FOLDER if there is none. One engine with
`--model-impl transformers` and one without it take turns in one process, so that other load hits
both. Printed per case: the median and quartiles of the bridge's rate over the native one's.
Expected are 0.85 for prompts and 0.7 for one stream.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
#: Requests, input tokens and output tokens of one turn, and the ratio that is expected.
CASES = {"prompt": (1, 513, 1, 0.85), "one stream": (1, 16, 25, 0.7), "batch": (8, 64, 16, None)}


def write(folder: Path) -> None:
    """A random checkpoint of SHAPE."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from modulm.testing.checkpoints import make_tokenizer

    torch.manual_seed(0)
    config = Qwen3Config(**SHAPE)
    Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    make_tokenizer(folder)


def main() -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--quantization")
    options = parser.parse_args()
    if not (options.folder / "config.json").exists():
        write(options.folder)
    from modulm import LLM, SamplingParams

    flags = {"dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 29, "max_num_seqs": 8,
             "quantization": options.quantization, "speculative": "off"}  # fmt: skip
    engines = {
        name: LLM(str(options.folder), model_impl=name, **flags)
        for name in ("transformers", "modulm")
    }
    source = random.Random(0)

    def seconds(llm: LLM, requests: int, tokens: int, output: int) -> float:
        prompts = [[source.randrange(1000, 30000) for _ in range(tokens)] for _ in range(requests)]
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
        return time.perf_counter() - began

    for name, (*sizes, least) in CASES.items():
        for llm in engines.values():
            seconds(llm, *sizes)
        ratios, spent = [], dict.fromkeys(engines, 0.0)
        for turn in range(options.rounds):
            order = list(engines) if turn % 2 else list(engines)[::-1]
            taken = {each: seconds(engines[each], *sizes) for each in order}
            ratios.append(taken["modulm"] / taken["transformers"])
            for each, value in taken.items():
                spent[each] += value / options.rounds
        low, middle, high = statistics.quantiles(ratios, n=4)
        wanted = "" if least is None else f", expected {least}"
        print(
            f"{name:10} {middle:.2f} ({low:.2f} to {high:.2f}){wanted}; "
            f"{spent['transformers']:.2f} s beside {spent['modulm']:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
