"""A model that transformers does not have is checked against its author's own implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from modulm.plugins import PluginManager
from modulm.testing import kit
from modulm.testing.oracles import Oracle

FREQUENCIES = 10_000.0


class Plain:
    """A decoder of the common kind in thirty lines of torch, with a head of its own name."""

    def weights(self, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        hidden, inner, vocabulary = (
            config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
        )
        keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
        tensors = {
            "model.embed_tokens.weight": torch.randn(vocabulary, hidden),
            "model.norm.weight": 1 + torch.randn(hidden) * 0.1,
            "lm_head.weight": torch.randn(vocabulary, hidden) * 3 / hidden**0.5,
        }
        shapes = {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        for layer in range(config["num_hidden_layers"]):
            for name, shape in shapes.items():
                weight = torch.randn(shape) * shape[1] ** -0.5
                tensors[f"model.layers.{layer}.{name}.weight"] = weight
            for name in ("input_layernorm", "post_attention_layernorm"):
                norm = 1 + torch.randn(hidden) * 0.1
                tensors[f"model.layers.{layer}.{name}.weight"] = norm
        return tensors

    def logits(
        self, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], tokens: Sequence[int]
    ) -> torch.Tensor:
        heads, eps = config["num_attention_heads"], config["rms_norm_eps"]
        size = config["hidden_size"] // heads
        steps = torch.arange(len(tokens)).float()[:, None]
        angles = steps * FREQUENCIES ** -(torch.arange(0, size, 2).float() / size)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            return weights[name] * x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()

        def split(x: torch.Tensor) -> torch.Tensor:
            return x.view(len(tokens), -1, size).transpose(0, 1)

        def turned(x: torch.Tensor) -> torch.Tensor:
            half = x[..., : size // 2], x[..., size // 2 :]
            return x * cos + torch.cat([-half[1], half[0]], -1) * sin

        x = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        for layer in range(config["num_hidden_layers"]):
            part = {
                name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight"): weight
                for name, weight in weights.items()
                if name.startswith(f"model.layers.{layer}.")
            }
            seen = norm(x, f"model.layers.{layer}.input_layernorm.weight")
            q, k, v = (split(seen @ part[f"self_attn.{name}_proj"].T) for name in "qkv")
            groups = heads // config["num_key_value_heads"]
            k, v = (each.repeat_interleave(groups, 0) for each in (turned(k), v))
            mixed = torch.nn.functional.scaled_dot_product_attention(
                turned(q)[None], k[None], v[None], is_causal=True
            )[0]
            x = x + mixed.transpose(0, 1).flatten(1) @ part["self_attn.o_proj"].T
            seen = norm(x, f"model.layers.{layer}.post_attention_layernorm.weight")
            gate = torch.nn.functional.silu(seen @ part["mlp.gate_proj"].T)
            x = x + (gate * (seen @ part["mlp.up_proj"].T)) @ part["mlp.down_proj"].T
        return norm(x, "model.norm.weight") @ weights["lm_head.weight"].T


class Wrong(Plain):
    """Forgets the last norm's weight."""

    def logits(self, config: Any, weights: Any, tokens: Any) -> torch.Tensor:
        norm = {"model.norm.weight": torch.ones_like(weights["model.norm.weight"])}
        return super().logits(config, {**weights, **norm}, tokens)


def driver(oracle: str = "") -> type:
    """The llama driver under a name that transformers does not know."""
    base = PluginManager().load("models", "LlamaForCausalLM")

    class NobodysForCausalLM(base):  # type: ignore[misc,valid-type]
        @classmethod
        def tiny(cls) -> Mapping[str, Any]:
            plain = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": FREQUENCIES}
            settings = {"architectures": ["NobodysForCausalLM"], "model_type": "nobodys"}
            sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu"}
            return {
                "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                "max_position_embeddings": 256, **sizes, **plain, **settings,
            }  # fmt: skip

    NobodysForCausalLM.oracle = oracle
    return NobodysForCausalLM


def test_without_an_oracle_there_is_nothing_to_compare_with() -> None:
    with pytest.raises(AttributeError, match="NobodysForCausalLM"):
        kit.check("models", driver())


def test_the_oracle_that_the_driver_names() -> None:
    kit.check("models", driver(f"{__name__}:Plain"))


def test_an_oracle_by_hand_finds_what_differs() -> None:
    oracle: Oracle = Wrong()
    with pytest.raises(AssertionError, match="the oracle: log probabilities differ by"):
        kit.check("models", driver(), oracle=oracle)
