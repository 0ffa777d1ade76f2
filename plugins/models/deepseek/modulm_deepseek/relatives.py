"""Models with DeepSeek-V3's block: GLM 4.7 Flash (Z.ai, 2026), Youtu-LLM (Tencent, 2025), Sarvam
105B (Sarvam AI, 2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm_deepseek.deepseek_v2 import DeepseekConfig, DeepseekForCausalLM, tiny_deepseek
from modulm_deepseek.deepseek_v3 import DeepseekV3Config
from modulm_layers import Rope, only, parse_rope, size

__all__ = [
    "Glm4MoeLiteConfig",
    "Glm4MoeLiteForCausalLM",
    "SarvamMLAConfig",
    "SarvamMLAForCausalLM",
    "YoutuConfig",
    "YoutuForCausalLM",
]


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


@frozen(kw_only=True)
class SarvamMLAConfig(DeepseekV3Config):
    """config.json of Sarvam 105B; its rotary scaling is called "deepseek_yarn".

    Their own code subtracts the mean from the bias for the choice, which does not change it.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        **DeepseekConfig.ALIASES,
        "num_shared_experts": "n_shared_experts",
        "score_function": "scoring_func",
    }

    n_shared_experts: int | None = size(1)
    first_k_dense_replace: int = size(1, least=0)
    num_nextn_predict_layers: int = size(0, least=0)
    moe_router_enable_expert_bias: bool = True
    moe_shared_expert_intermediate_size: int | None = size(None)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(
            self,
            moe_router_enable_expert_bias=(True,),
            moe_shared_expert_intermediate_size=(None, self.moe_intermediate_size),
        )

    def rope(self, layer_type: str = "") -> Rope:
        table = dict(self.rope_scaling or self.rope_parameters or {})
        if table.get("rope_type", table.get("type")) != "deepseek_yarn":
            return super().rope(layer_type)
        if self.original_max_position_embeddings is not None:
            table["original_max_position_embeddings"] = self.original_max_position_embeddings
        return parse_rope(
            {"rope_theta": self.rope_theta, **table, "rope_type": "yarn"},
            head_size=self.head_size,
            max_positions=self.max_position_embeddings,
            neox=not self.rope_interleave,
        )


class SarvamMLAForCausalLM(DeepseekForCausalLM):
    """Sarvam 105B with a language-model head."""

    api = 1
    config_type = SarvamMLAConfig
    oracle = "modulm_deepseek.oracle:AsDeepseekV3"

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        yarn = {"type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 64}
        table = dict(tiny_deepseek("sarvam_mla", "SarvamMLAForCausalLM", q_lora_rank=40))
        experts, shared = table.pop("n_routed_experts"), table.pop("n_shared_experts")
        scales = {"mscale": 1.0, "mscale_all_dim": 0.8}
        table |= {"num_experts": experts, "num_shared_experts": shared, "score_function": "sigmoid"}
        return {**table, "rope_scaling": {**yarn, **scales}}


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
