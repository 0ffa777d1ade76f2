"""One stream on a mixture of experts: python bench/mixture.py FOLDER [--quantization int8]

Writes a random bf16 checkpoint of a 1-billion-parameter Qwen3-MoE shape to FOLDER if there is none,
then decodes one stream with the engine and with transformers. The reference is the time to read the
weights that one token needs (its experts, all shared layers, the head) and the KV cache, at the
read bandwidth that the probe measures before and after each round. Tokens and probe passes are
averaged alike, since other load slows both down.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import modulm_kernels_cpu as kernels
from modulm_kernels_cpu.probe import ReadProbe

SHAPE = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
PROMPT = list(range(100, 132))
SHORT, LONG = 8, 56
PASSES = 5  # probe passes before and after a round
#: Bytes that the probe reads, about as many as all weights: more than any last-level cache.
SIZE = 2 << 30

Generate = Callable[[int], None]


def write(folder: Path) -> None:
    """A random checkpoint of SHAPE."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from modulm.testing.checkpoints import make_tokenizer

    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SHAPE)
    Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    make_tokenizer(folder)


#: Bits per weight, including scales: in experts, in other linear layers, in the head.
BITS = {None: (16, 16, 16), "int8": (8, 8, 8), "int4": (4.5, 4.5, 8)}


def active(quantization: str | None = None) -> int:
    """Bytes of weights that one token reads."""
    in_experts, in_linears, in_head = BITS[quantization]
    s = SHAPE
    hidden, heads = s["hidden_size"], s["num_attention_heads"] + 2 * s["num_key_value_heads"]
    experts = 3 * hidden * s["moe_intermediate_size"] * s["num_experts_per_tok"]
    attention = hidden * s["head_dim"] * (heads + s["num_attention_heads"])
    router = hidden * s["num_experts"]
    length = len(PROMPT) + (SHORT + LONG) // 2
    cached = length * 2 * s["num_key_value_heads"] * s["head_dim"]
    layer = (experts * in_experts + (attention + router) * in_linears + cached * 16) / 8
    return int(s["num_hidden_layers"] * layer + hidden * s["vocab_size"] * in_head / 8)


def parameters() -> int:
    """The number of all weights of the shape."""
    more = SHAPE["num_experts"] - SHAPE["num_experts_per_tok"]
    idle = 3 * SHAPE["hidden_size"] * SHAPE["moe_intermediate_size"] * more
    return active() // 2 + idle * SHAPE["num_hidden_layers"]


def engine(folder: Path, quantization: str | None) -> Generate:
    """The engine in this process."""
    from modulm import LLM, SamplingParams

    llm = LLM(
        model=str(folder),
        dtype="bfloat16",
        quantization=quantization,
        max_model_len=512,
        max_num_seqs=1,
        kv_cache_memory_bytes=256 << 20,
        enable_prefix_caching=False,
        speculative="off",
    )

    def generate(new: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        found = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        assert len(found[0].outputs[0].token_ids) == new

    return generate


def peer(folder: Path) -> Generate:
    """transformers with its own KV cache, in bf16."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None

    def generate(new: int) -> None:
        ids = torch.tensor([PROMPT])
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new,
                pad_token_id=0,
            )

    return generate


def per_token(generate: Generate, longer: int = LONG) -> float:
    """Seconds per additional token."""
    times = []
    for new in (SHORT, longer):
        start = time.perf_counter()
        generate(new)
        times.append(time.perf_counter() - start)
    return (times[1] - times[0]) / (longer - SHORT)


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Return the table's figures by name."""
    library = kernels.load()
    needed = active(options.quantization)
    generate = engine(options.folder, options.quantization)
    generate(SHORT)
    probe, rounds = ReadProbe(library, SIZE), []
    for _ in range(options.rounds):
        passes = [probe.rate() for _ in range(PASSES)]
        seconds = per_token(generate)
        passes += [probe.rate() for _ in range(PASSES)]
        rounds.append((seconds, statistics.harmonic_mean(passes)))
    fractions = [needed / seconds / 1e9 / read for seconds, read in rounds]
    found: dict[str, object] = {
        "level": library.level,
        "threads": library.threads,
        "parameters": parameters(),
        "MB per token": round(needed / 1e6, 1),
        "read GB/s": [round(read, 1) for _, read in rounds],
        "ms per token": [round(seconds * 1e3, 2) for seconds, _ in rounds],
        "fraction of the roofline": [round(f, 3) for f in fractions],
        "median fraction": round(statistics.median(fractions), 3),
    }
    if options.peer:
        library.set_threads(1)  # its helper threads would spin beside torch's
        other = peer(options.folder)
        other(2)
        slow = per_token(other, 2 * SHORT)
        found["transformers ms per token"] = round(slow * 1e3, 2)
        found["ratio to transformers"] = round(slow / min(s for s, _ in rounds), 2)
    return found


def main() -> None:
    """Print the figures; write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the checkpoint is or goes")
    parser.add_argument("--quantization", choices=["int8", "int4"], help="as for the engine")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", action="store_true", help="write the checkpoint and stop")
    parser.add_argument("--no-peer", dest="peer", action="store_false")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    if not (options.folder / "config.json").exists():
        write(options.folder)
    if options.write:
        return
    found = measure(options)
    for name, value in found.items():
        print(f"{name:26} {value}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
