"""Mixtures of experts: python bench/mixture.py FOLDER [--shape NAME] [--quantization int8]

One stream, `--streams N` at once or a prompt of `--prompt N` tokens, as a share of what the machine
could do. The reference of a step is the time to read the weights that its tokens use (all shared
layers, the head, the experts that they choose) and the KV cache, or, if it is longer, the time of
its products; that of a prompt is the time of its products. The read bandwidth and the rate of
products (a GEMM in bf16, or the instruction for bytes, if weights are quantized and the machine has
one: inputs are then, too) are measured before and after each round. Steps and probe passes are
averaged alike, since other load slows both down.

FOLDER gets config.json and a tokenizer if it is empty, for the shape `small` with `--write` also a
random checkpoint in bf16, with which one stream is compared with transformers. A folder whose
model has other sizes is refused. Other weights are invented as they are loaded. `--layers` takes
fewer layers and as much less vocabulary: then layers and head have their shares of the whole model,
and the fixed costs of a step too large ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from probe import gemm_rate

import modulm_kernels_cpu as kernels
from modulm_kernels_cpu.probe import ReadProbe, instruction_rates

_QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}
#: By name, entries of config.json. The last two are those of published models.
SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        **_QWEN,
        "vocab_size": 32768,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 384,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 32,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        **_QWEN,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "olmoe-1b-7b": {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    },
}
PROMPTED = 32  # tokens of a stream's prompt
SHORT, LONG = 8, 56
PASSES = 5  # probe passes before and after a round
#: Bytes that the probe reads: more than any last-level cache.
SIZE = 2 << 30

Generate = Callable[[int], None]

#: Bits per weight, including scales: in experts, in other linear layers, in the head.
BITS = {None: (16, 16, 16), "int8": (8, 8, 8), "int4": (4.5, 4.5, 8)}


class Costs:
    """What tokens of a shape cost, in bytes read and in products."""

    def __init__(self, config: dict[str, Any], quantization: str | None) -> None:
        self.in_experts, self.in_linears, self.in_head = BITS[quantization]
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        size = config.get("head_dim") or hidden // heads
        self.kv = config["num_key_value_heads"] * size
        self.layers, self.chosen = config["num_hidden_layers"], config["num_experts_per_tok"]
        inner = config.get("moe_intermediate_size") or config["intermediate_size"]
        self.expert = 3 * hidden * inner
        self.shared = 2 * hidden * (size * heads + self.kv) + hidden * config["num_experts"]
        self.head = hidden * config["vocab_size"]
        self.experts, self.heads = config["num_experts"], heads * size
        self.embedding = 0 if config["tie_word_embeddings"] else self.head

    def parameters(self) -> int:
        """The number of all weights."""
        layer = self.experts * self.expert + self.shared
        return self.layers * layer + self.head + self.embedding

    def bytes_of_head(self) -> float:
        """Bytes of the head that a step reads."""
        return self.head * self.in_head / 8

    def bytes_of_step(self, streams: int, used: float, length: float) -> float:
        """Bytes that a step reads: `used` experts of each layer, `length` tokens of each cache."""
        weights = used * self.expert * self.in_experts + self.shared * self.in_linears
        cached = streams * length * 2 * self.kv * 16
        return self.layers * (weights + cached) / 8 + self.bytes_of_head()

    def flops(self, tokens: int, length: float, sampled: int) -> float:
        """Operations of `tokens` tokens that see `length` tokens on average."""
        products = self.chosen * self.expert + self.shared + 2 * self.heads * length
        return 2.0 * (tokens * self.layers * products + sampled * self.head)


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    """The shape's entries of config.json, of the part that is computed."""
    config = dict(SHAPES[options.shape])
    if options.layers:
        part = options.layers / config["num_hidden_layers"]
        config["num_hidden_layers"] = options.layers
        config["vocab_size"] = max(512, round(config["vocab_size"] * part / 64) * 64)
    return config


def write(folder: Path, config: dict[str, Any], weights: bool) -> None:
    """A folder with a configuration and a tokenizer; with weights, a random checkpoint."""
    from modulm.testing.checkpoints import make_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    if weights:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        torch.manual_seed(0)
        shape = Qwen3MoeConfig(**config)
        Qwen3MoeForCausalLM._from_config(shape, dtype=torch.bfloat16).save_pretrained(folder)
    else:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    make_tokenizer(folder)


def load(options: argparse.Namespace, **more: Any) -> Any:
    """The engine in this process."""
    from modulm import LLM

    stored = (options.folder / "model.safetensors").exists()
    return LLM(
        model=str(options.folder),
        load_format="auto" if stored else "dummy",
        dtype="bfloat16",
        quantization=options.quantization,
        max_model_len=max(512, options.prompt + 64),
        max_num_seqs=options.streams,
        max_num_batched_tokens=max(2048, options.prompt),
        kv_cache_memory_bytes=512 << 20,
        enable_prefix_caching=False,
        speculative="off",
        **more,
    )


def prompts(options: argparse.Namespace) -> list[list[int]]:
    """As many prompts as streams, of random ids."""
    random = np.random.default_rng(0)
    length = options.prompt or PROMPTED
    return [random.integers(100, 500, length).tolist() for _ in range(options.streams)]


def answers(llm: Any, ids: Sequence[list[int]], new: int) -> Any:
    """Generate `new` tokens after each of these prompts."""
    from modulm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    asked = [{"prompt_token_ids": one} for one in ids]
    found = llm.generate(asked, params, use_tqdm=False)
    assert all(len(one.outputs[0].token_ids) == new for one in found)
    return found


def experts_used(options: argparse.Namespace, config: dict[str, Any]) -> float:
    """How many experts of a layer a step uses, on average of the steps that are timed."""
    if options.streams == 1:
        return float(config["num_experts_per_tok"])
    from modulm_expert_routes import chosen_experts

    llm = load(options, enable_return_routed_experts=True)
    chosen = [chosen_experts(one.outputs[0]) for one in answers(llm, prompts(options), LONG)]
    del llm
    gc.collect()
    # By step and layer, the choices of all streams.
    timed = np.concatenate([one[PROMPTED + SHORT :] for one in chosen if one is not None], axis=-1)
    return float(np.mean([len(set(layer)) for step in timed for layer in step.tolist()]))


def peer(folder: Path) -> Generate:
    """transformers with its own KV cache, in bf16."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None

    def generate(new: int) -> None:
        ids = torch.tensor([[*range(100, 132)]])
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


class Rounds:
    """Rounds of steps or prompts beside the rates of the same time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.library = kernels.load()
        self.options, self.config = options, config_of(options)
        self.costs = Costs(self.config, options.quantization)
        self.used = 0.0 if options.prompt else experts_used(options, self.config)
        self.ids = prompts(options)
        self.llm = load(options)
        self.generate(2 if options.prompt else SHORT)
        # A long step is bound by its products, too.
        self.computes = options.prompt or options.streams > 1
        self.probe = None if options.prompt else ReadProbe(self.library, SIZE)

    def generate(self, new: int) -> None:
        answers(self.llm, self.ids, new)

    def rates(self) -> tuple[list[float], list[float]]:
        """GB/s of some passes and GFLOP/s, if they are needed."""
        read = [self.probe.rate() for _ in range(PASSES)] if self.probe else []
        return read, [self.products()] if self.computes else []

    def products(self) -> float:
        """GFLOP/s of the products that this model's layers are made of."""
        if self.options.quantization:
            rates = instruction_rates(self.library)
            if bytes_of := [rates[name] for name in ("vpdpbusd", "tdpbssd") if name in rates]:
                return 2 * max(bytes_of)
        return gemm_rate(seconds=0.3)

    def limit(self, read: float, gemm: float) -> float:
        """Seconds that the machine would need."""
        streams, tokens = self.options.streams, self.options.prompt
        if tokens:
            return self.costs.flops(tokens, tokens / 2, 1) / gemm / 1e9
        length = PROMPTED + (SHORT + LONG) // 2
        reading = self.costs.bytes_of_step(streams, self.used, length) / read / 1e9
        if not self.computes:
            return reading
        return max(reading, self.costs.flops(streams, length, streams) / gemm / 1e9)

    def one(self) -> dict[str, float]:
        """Measure one round: `seconds`, the rates, and the share of the limit."""
        before = self.rates()
        if self.options.prompt:
            start = time.perf_counter()
            self.generate(1)
            seconds = time.perf_counter() - start
        else:
            seconds = per_token(self.generate)
        after = self.rates()
        read = statistics.harmonic_mean(before[0] + after[0]) if self.probe else 0.0
        gemm = max(before[1] + after[1]) if self.computes else 0.0
        share = self.limit(read, gemm) / seconds
        return {"seconds": seconds, "read": read, "gemm": gemm, "share": share}


def summary(measured: Rounds, rounds: Sequence[dict[str, float]]) -> dict[str, object]:
    """The table's figures by name."""
    costs, options = measured.costs, measured.options
    shares = [one["share"] for one in rounds]
    found: dict[str, object] = {
        "shape": f"{options.shape}, {costs.layers} layers",
        "level": measured.library.level,
        "threads": measured.library.threads,
        "parameters": costs.parameters(),
    }
    if not options.prompt:
        length = PROMPTED + (SHORT + LONG) // 2
        size = costs.bytes_of_step(options.streams, measured.used, length)
        found["experts of a layer in a step"] = round(measured.used, 2)
        found["MB of a step"] = round(size / 1e6, 1)
        found["of these in the head"] = round(costs.bytes_of_head() / 1e6, 1)
        found["read GB/s"] = [round(one["read"], 1) for one in rounds]
    if measured.computes:
        found["products GFLOP/s"] = [round(one["gemm"]) for one in rounds]
    found["ms"] = [round(one["seconds"] * 1e3, 2) for one in rounds]
    tokens = options.prompt or options.streams
    found["tokens/s"] = [round(tokens / one["seconds"], 1) for one in rounds]
    found["share of the limit"] = [round(share, 3) for share in shares]
    if len(shares) > 1:
        parts = statistics.quantiles(shares, method="inclusive")
        found["quartiles"] = [round(part, 3) for part in parts]
    return found


def compared(measured: Rounds, rounds: Sequence[dict[str, float]]) -> dict[str, object]:
    """The same stream with transformers."""
    measured.library.set_threads(1)  # its helper threads would spin beside torch's
    other = peer(measured.options.folder)
    other(2)
    slow = per_token(other, 2 * SHORT)
    return {
        "transformers ms per token": round(slow * 1e3, 2),
        "ratio to transformers": round(slow / min(one["seconds"] for one in rounds), 2),
    }


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of `arguments`, by default the command line's, with the folder filled."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the model is or goes")
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--quantization", choices=["int8", "int4"], help="as for the engine")
    parser.add_argument("--streams", type=int, default=1, help="requests at once")
    parser.add_argument("--prompt", type=int, default=0, help="measure a prompt of so many tokens")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", action="store_true", help="write the checkpoint and stop")
    parser.add_argument("--no-peer", dest="peer", action="store_false")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    config, path = config_of(options), options.folder / "config.json"
    if not path.exists():
        write(options.folder, config, options.write and options.shape == "small")
    held = json.loads(path.read_text())
    for key in sorted(config.keys() & held.keys()):
        if held[key] != config[key]:
            parser.error(f"{path} has {key} {held[key]}, not {config[key]}: take another folder")
    return options


def main() -> None:
    """Print the figures; write JSON if requested."""
    options = parsed()
    if options.write:
        return
    measured = Rounds(options)
    rounds = [measured.one() for _ in range(options.rounds)]
    found = summary(measured, rounds)
    stored = (options.folder / "model.safetensors").exists()
    if options.peer and stored and options.streams == 1 and not options.prompt:
        found |= compared(measured, rounds)
    for name, value in found.items():
        print(f"{name:28} {value}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
