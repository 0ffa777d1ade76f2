"""References for tests of models that transformers lacks: its models with the same computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from modulm_layers.testing import Converted, rotary

__all__ = ["AsBidirectionalQwen3", "AsQwen2", "QWenAsQwen2"]


class AsQwen2:
    """transformers' Qwen 2 with the same weights."""

    def weights(self, config: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Random weights, with about unit gain per layer."""
        model = _model(config)
        tables = model.model.embed_tokens.weight, model.lm_head.weight
        tensors = {}
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape)
            if parameter.dim() < 2:
                tensors[name] = 0.1 * drawn + name.endswith("norm.weight")
            else:
                head = 3 if parameter is tables[1] else 1
                gain = 1.0 if parameter is tables[0] else head * parameter.shape[-1] ** -0.5
                tensors[name] = gain * drawn
        return tensors

    def logits(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: Sequence[int]
    ) -> Tensor:
        """[tokens, vocabulary] in fp32."""
        model = _model(config)
        model.load_state_dict(weights)
        logits: Tensor = model(torch.tensor([list(tokens)])).logits[0]
        return logits


def _model(config: Mapping[str, Any]) -> Any:
    reference_config = Qwen2Config.from_dict({**config, "model_type": "qwen2"})
    model: Any = AutoModelForCausalLM.from_config(
        reference_config, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


_QWEN = {
    "model.embed_tokens": "transformer.wte",
    "model.layers": "transformer.h",
    "model.norm": "transformer.ln_f",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.gate_proj": "mlp.w2",
    "mlp.up_proj": "mlp.w1",
    "mlp.down_proj": "mlp.c_proj",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
}


class QWenAsQwen2(Converted):
    """transformers' Qwen 2 with weights of Qwen 1."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            **config,
            "model_type": "qwen2",
            "hidden_act": "silu",  # Qwen's own code has no key for it
            "intermediate_size": config["intermediate_size"] // 2,
            "rms_norm_eps": config.get("layer_norm_epsilon", 1e-6),
            "rope_parameters": rotary(
                {"rope_theta": config.get("rotary_emb_base", 10000.0), **config}
            ),
            **({"head_dim": config["kv_channels"]} if "kv_channels" in config else {}),
        }

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        stored = dict(weights)
        for name in [name for name in weights if ".q_proj." in name]:
            parts = [stored.pop(name.replace("q_proj", f"{n}_proj")) for n in "qkv"]
            stored[name.replace("self_attn.q_proj", "attn.c_attn")] = torch.cat(parts)
        return self.renamed(stored, _QWEN)


class AsBidirectionalQwen3(Converted):
    """transformers' Qwen 3 with `is_causal: false`, and a linear layer."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        own = {"model_type": "qwen3", "is_causal": False, "tie_word_embeddings": False}
        return {**config, **own}

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        stored = dict(weights)
        # The head of transformers' decoder is as wide as the vocabulary: its first rows serve.
        head = stored.pop("lm_head.weight")
        return {**stored, "linear.weight": head[: config["num_labels"]]}

    def outputs(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: list[int]
    ) -> tuple[Tensor, None]:
        """Vectors of the tokens."""
        model = self._model(config)
        self._read(config, model, weights)
        states = model.model(torch.tensor([tokens])).last_hidden_state[0]
        return states @ weights["linear.weight"].T, None
