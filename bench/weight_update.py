"""An update of all weights from shared memory, against copying their bytes once.

    python bench/weight_update.py [--model FOLDER | --layers 28] [--quantization int4] [--rounds 3]

Without `--model`, it has the shape of Qwen3-0.6B (with 28 layers) and random weights, in bf16.
Ratios are of one run: `copy` writes the same tensors from one place in memory to another, `load`
reads the checkpoint from the file cache into an engine. Prints one line of JSON.
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
from safetensors.torch import load_file, save_file

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


def stored(folder: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, in memory of their own."""
    return {
        name: tensor.clone()
        for file in Path(folder).glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


class Timer:
    """Seconds of calls, and seconds of processors, which other load changes less."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu: list[float] = []

    def __call__(self, *functions: Callable[[], Any]) -> None:
        began, cpu = time.perf_counter(), time.process_time()
        for function in functions:
            function()
        self.seconds.append(time.perf_counter() - began)
        self.cpu.append(time.process_time() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--quantization")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    tensors = weights(options.layers, 1) if options.model is None else stored(options.model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        if options.model is None:
            save_file(tensors, path / "model.safetensors")
            config = {**SHAPE, "num_hidden_layers": options.layers}
            (path / "config.json").write_text(json.dumps(config))
        figures = measure(options.model or folder, tensors, options.quantization, options.rounds)
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
    copy, start, check, finish = Timer(), Timer(), Timer(), Timer()
    with SharedWeights(tensors) as shared:
        for _ in range(rounds):
            llm.generate(prompt, params, use_tqdm=False)
            copy(lambda: [other[n].copy_(t) for n, t in tensors.items()])
            start(llm.start_weight_update)
            check(lambda: llm.update_weights(shared.info))
            finish(llm.finish_weight_update)
    llm.shutdown()
    size = sum(tensor.nbytes for tensor in tensors.values())
    calls = (start, check, finish)
    seconds = median(map(sum, zip(*(call.seconds for call in calls), strict=True)))
    cpu = median(map(sum, zip(*(call.cpu for call in calls), strict=True)))
    return {
        "gigabytes": size / 1e9,
        "copy": median(copy.seconds),
        "update": seconds,
        "start": median(start.seconds),
        "check": median(check.seconds),
        "finish": median(finish.seconds),
        "load": load,
        "update_to_copy": seconds / median(copy.seconds),
        "update_to_load": seconds / load,
        "copy_cpu": median(copy.cpu),
        "check_cpu": median(check.cpu),
        "finish_cpu": median(finish.cpu),
        "update_to_copy_cpu": cpu / median(copy.cpu),
    }


if __name__ == "__main__":
    main()
