"""Reference for tests of Ling 2.0: transformers' GLM 4.5 with the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modulm_layers.testing import Converted

__all__ = ["AsGlm4Moe"]

_NAMES = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "e_score_correction_bias": "expert_bias",
}


class AsGlm4Moe(Converted):
    """transformers' GLM 4.5."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        part = config["partial_rotary_factor"]
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": part}
        return {
            **config,
            "model_type": "glm4_moe",
            "n_routed_experts": config["num_experts"],
            "n_shared_experts": config["num_shared_experts"],
            "attention_bias": config["use_qkv_bias"],
            "use_qk_norm": True,
            "rms_norm_eps": 1e-6,
            "num_nextn_predict_layers": 0,
            "rope_parameters": rope,
        }

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        stored = dict(weights)
        for name in weights:
            if ".q_proj." in name:
                parts = [stored.pop(name.replace("q_proj", f"{n}_proj")) for n in "qkv"]
                where = name.replace("self_attn.q_proj", "attention.query_key_value")
                stored[where] = torch.cat(parts)
            elif name.endswith("experts.gate_up_proj"):
                for expert, both in enumerate(stored.pop(name)):
                    at = name.removesuffix("gate_up_proj") + str(expert)
                    gate, up = both.chunk(2)
                    stored |= {f"{at}.gate_proj.weight": gate, f"{at}.up_proj.weight": up}
            elif name.endswith("experts.down_proj"):
                for expert, down in enumerate(stored.pop(name)):
                    at = name.removesuffix("down_proj") + str(expert)
                    stored[f"{at}.down_proj.weight"] = down
        return self.renamed(stored, _NAMES)
