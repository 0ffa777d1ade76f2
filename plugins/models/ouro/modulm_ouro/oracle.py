"""Reference for tests of Ouro: transformers' Llama, whose layers run several times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from modulm_layers.testing import Converted

__all__ = ["AsLlama"]


class AsLlama(Converted):
    """transformers' Llama with two more norms per layer."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**config, "model_type": "llama", "rms_norm_eps": 1e-6}

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        return weights

    def _model(self, config: Mapping[str, Any]) -> Any:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        model = super()._model(config)
        for layer in model.model.layers:
            for name in ("input_layernorm_2", "post_attention_layernorm_2"):
                layer.add_module(name, LlamaRMSNorm(config["hidden_size"], 1e-6))
        return model

    @torch.no_grad()
    def logits(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: Sequence[int]
    ) -> Tensor:
        """Compute logits: [tokens, vocabulary] fp32."""
        model = self._model(config)
        self._read(config, model, weights)
        inner, count = model.model, len(tokens)
        x = inner.embed_tokens(torch.tensor([list(tokens)]))
        turns = inner.rotary_emb(x, torch.arange(count)[None])
        later = torch.ones(count, count).triu(1).bool()
        inputs = {
            "position_embeddings": turns,
            "attention_mask": torch.zeros(count, count).masked_fill(later, -torch.inf)[None, None],
        }
        for _ in range(config["total_ut_steps"]):
            for layer in inner.layers:
                seen, _ = layer.self_attn(hidden_states=layer.input_layernorm(x), **inputs)
                x = x + layer.input_layernorm_2(seen)
                out = layer.mlp(layer.post_attention_layernorm(x))
                x = x + layer.post_attention_layernorm_2(out)
            x = inner.norm(x)
        logits: Tensor = model.lm_head(x)[0]
        return logits
