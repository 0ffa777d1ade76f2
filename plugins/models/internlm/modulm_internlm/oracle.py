"""Reference for tests of InternLM 2: transformers' Llama with the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from modulm_layers.testing import Converted, stack_heads

__all__ = ["AsLlama", "WithVisualExperts"]

_NAMES = {
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
}


class AsLlama(Converted):
    """transformers' Llama."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**config, "model_type": "llama", "attention_bias": config["bias"]}

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        stored = dict(weights)
        for name in [name for name in weights if ".q_proj." in name]:
            parts = [stored.pop(name.replace("q_proj", f"{n}_proj")) for n in "qkv"]
            where = name.replace("self_attn.q_proj", "attention.wqkv")
            stored[where] = stack_heads(*parts, config["num_key_value_heads"])
        return self.renamed(stored, _NAMES)


class WithVisualExperts(AsLlama):
    """transformers' Llama; the files have a second feed-forward block per layer."""

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        stored = super().store(config, weights)
        visual = {
            name.replace(".feed_forward.", ".feed_forward_ve."): tensor
            for name, tensor in stored.items()
        }
        return {**visual, **stored}
