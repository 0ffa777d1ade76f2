"""An update of all weights from shared memory, against copying their bytes once.

    python bench/weight_update.py [--layers 28] [--quantization int4] [--rounds 3]

The model has the shape of Qwen3-0.6B (with 28 layers) and random weights, in bf16. Ratios are of
one run: `copy` writes the same tensors from one place in memory to another, `load` reads the
checkpoint from the file cache into an engine. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from modulm import LLM, SamplingParams
from modulm_weights_shared_memory import SharedWeights

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936,
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


def weights(layers: int, seed: int) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint."""
    draw = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return (0.02 * torch.randn(*shape, generator=draw)).to(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": matrix(151936, 1024)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (2048, 1024), "self_attn.k_proj": (1024, 1024),
            "self_attn.v_proj": (1024, 1024), "self_attn.o_proj": (1024, 2048),
            "mlp.gate_proj": (3072, 1024), "mlp.up_proj": (3072, 1024),
            "mlp.down_proj": (1024, 3072),
        }.items():  # fmt: skip
            tensors[f"{at}{name}.weight"] = matrix(*shape)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            tensors[f"{at}{name}.weight"] = torch.ones(128, dtype=torch.bfloat16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = torch.ones(1024, dtype=torch.bfloat16)
    tensors["model.norm.weight"] = torch.ones(1024, dtype=torch.bfloat16)
    return tensors


def timed(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--quantization")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    tensors = weights(options.layers, 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        save_file(tensors, path / "model.safetensors")
        config = {**SHAPE, "num_hidden_layers": options.layers}
        (path / "config.json").write_text(json.dumps(config))
        figures = measure(folder, tensors, options.quantization, options.rounds)
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


def measure(
    folder: str, tensors: dict[str, torch.Tensor], quantization: str | None, rounds: int
) -> dict[str, float]:
    """Load the checkpoint and update all its weights `rounds` times; returns seconds and ratios."""
    began = time.perf_counter()
    llm = LLM(
        folder,
        dtype="bfloat16",
        max_model_len=512,
        num_gpu_blocks_override=64,
        quantization=quantization,
        skip_tokenizer_init=True,
        weight_transfer_config={"backend": "shared_memory"},
    )
    load = time.perf_counter() - began
    prompt = [{"prompt_token_ids": [5, 9, 40]}]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm.init_weight_transfer_engine()
    other = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    copies, checks, finishes, updates = [], [], [], []
    with SharedWeights(tensors) as shared:
        for _ in range(rounds):
            llm.generate(prompt, params, use_tqdm=False)
            copies.append(timed(lambda: [other[n].copy_(t) for n, t in tensors.items()]))
            start = timed(llm.start_weight_update)
            checks.append(timed(lambda: llm.update_weights(shared.info)))
            finishes.append(timed(llm.finish_weight_update))
            updates.append(start + checks[-1] + finishes[-1])
    llm.shutdown()
    copy, update = median(copies), median(updates)
    size = sum(tensor.nbytes for tensor in tensors.values())
    return {
        "gigabytes": size / 1e9,
        "copy": copy,
        "update": update,
        "check": median(checks),
        "finish": median(finishes),
        "load": load,
        "update_to_copy": update / copy,
        "update_to_load": update / load,
    }


if __name__ == "__main__":
    main()
