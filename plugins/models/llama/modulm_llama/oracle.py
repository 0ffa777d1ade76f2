"""References for tests: transformers' Llama with `is_causal: false`, and from fairseq2's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modulm_layers.testing import Converted

__all__ = ["AsBidirectional", "FromFairseq2"]

_FAIRSEQ2 = {
    "model.embed_tokens": "decoder_frontend.embed",
    "model.norm": "decoder.layer_norm",
    "model.layers": "decoder.layers",
    "lm_head": "final_proj",
    "input_layernorm": "self_attn_layer_norm",
    "post_attention_layernorm": "ffn_layer_norm",
    "self_attn.o_proj": "self_attn.output_proj",
    "mlp.gate_proj": "ffn.gate_proj",
    "mlp.up_proj": "ffn.inner_proj",
    "mlp.down_proj": "ffn.output_proj",
}


class FromFairseq2(Converted):
    """transformers' Llama, whose heads rotate both halves instead of neighbours."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**config, "model_type": "llama"}

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        stored = dict(weights)
        for name, tensor in weights.items():
            if "q_proj." in name or "k_proj." in name:
                halves = tensor.view(-1, 2, dim // 2, *tensor.shape[1:])
                stored[name] = halves.transpose(1, 2).reshape(tensor.shape)
        return self.renamed(stored, _FAIRSEQ2)


class AsBidirectional(Converted):
    """transformers' Llama; classes are those of the mean over the tokens."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        own = {"model_type": "llama", "is_causal": False, "tie_word_embeddings": False}
        return {**config, **own}

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        kept = {n.removeprefix("model."): t for n, t in weights.items() if "lm_head" not in n}
        if "id2label" not in config:
            return kept
        kept = {f"model.{name}": tensor for name, tensor in kept.items()}
        # The head of transformers' decoder is as wide as the vocabulary: its first rows serve.
        return {**kept, "score.weight": weights["lm_head.weight"][: len(config["id2label"])]}

    def outputs(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states, and the classes of their mean."""
        model = self._model(config)
        self._read(config, model, weights)
        states: Tensor = model.model(torch.tensor([tokens])).last_hidden_state[0]
        score = weights.get("score.weight")
        return states, None if score is None else states.mean(0, keepdim=True) @ score.T
