"""Models with DeepSeek-V3's block: GLM 4.7 Flash (Z.ai, 2026), Youtu-LLM (Tencent, 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm_deepseek.deepseek_v2 import DeepseekForCausalLM, tiny_deepseek
from modulm_deepseek.deepseek_v3 import DeepseekV3Config
from modulm_layers import size

__all__ = ["Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", "YoutuConfig", "YoutuForCausalLM"]


@frozen(kw_only=True)
class Glm4MoeLiteConfig(DeepseekV3Config):
    """config.json of GLM 4.7 Flash."""

    rms_norm_eps: float = 1e-5
    routed_scaling_factor: float = 1.8
    n_shared_experts: int | None = size(1)
    first_k_dense_replace: int = size(1, least=0)


@frozen(kw_only=True)
class YoutuConfig(DeepseekV3Config):
    """config.json of Youtu-LLM, which has no experts."""

    max_position_embeddings: int = size(131072)
    tie_word_embeddings: bool = True
    n_routed_experts: int = size(1)
    num_experts_per_tok: int = size(1)
    moe_intermediate_size: int = size(1)
    num_nextn_predict_layers: int = size(0, least=0)

    def sparse(self, index: int) -> bool:
        return False


class Glm4MoeLiteForCausalLM(DeepseekForCausalLM):
    """GLM 4.7 Flash with a language-model head."""

    api = 1
    config_type = Glm4MoeLiteConfig

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        changes = {"q_lora_rank": 40, "mlp_layer_types": ["dense", "sparse", "sparse"]}
        return tiny_deepseek("glm4_moe_lite", "Glm4MoeLiteForCausalLM", **changes)


class YoutuForCausalLM(DeepseekForCausalLM):
    """Youtu-LLM with a language-model head."""

    api = 1
    config_type = YoutuConfig

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        # transformers 5 zeros the padding token's vector whenever it loads the model.
        changes = {"q_lora_rank": 40, "pad_token_id": None}
        return tiny_deepseek("youtu", "YoutuForCausalLM", **changes)
