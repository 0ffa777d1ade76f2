"""Reference for tests of EXAONE 3: transformers' Llama with the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from modulm_layers.testing import Converted

__all__ = ["AsLlama"]

_NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.layers": "transformer.h",
    "model.norm": "transformer.ln_f",
    "self_attn.o_proj": "attn.attention.out_proj",
    "self_attn": "attn.attention",
    "mlp.gate_proj": "mlp.c_fc_0",
    "mlp.up_proj": "mlp.c_fc_1",
    "mlp.down_proj": "mlp.c_proj",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
}


class AsLlama(Converted):
    """transformers' Llama."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        layers, eps = config["num_layers"], config["layer_norm_epsilon"]
        return {
            **config,
            "model_type": "llama",
            "num_hidden_layers": layers,
            "rms_norm_eps": eps,
            "hidden_act": config.get("activation_function", "silu"),
        }

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        return self.renamed(weights, _NAMES)
