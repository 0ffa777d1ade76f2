"""DeepSeek-V3 and R1 (arXiv 2412.19437): V2's block with sigmoid routing and a bias for balance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import field, frozen, validators

from modulm_deepseek.deepseek_v2 import DeepseekConfig, DeepseekForCausalLM, tiny_deepseek
from modulm_layers import TextVectors, size

__all__ = ["DeepseekV3BidirectionalModel", "DeepseekV3Config", "DeepseekV3ForCausalLM"]


@frozen(kw_only=True)
class DeepseekV3Config(DeepseekConfig):
    """config.json of DeepSeek-V3."""

    BIDIRECTIONAL: ClassVar[bool] = True

    routed_scaling_factor: float = 2.5
    num_nextn_predict_layers: int = size(1, least=0)
    topk_method: str = field(default="noaux_tc", validator=validators.in_(("noaux_tc",)))
    scoring_func: str = field(default="sigmoid", validator=validators.in_(("sigmoid",)))


class DeepseekV3ForCausalLM(DeepseekForCausalLM):
    """DeepSeek-V3 with a language-model head."""

    api = 1
    config_type = DeepseekV3Config

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_deepseek(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            q_lora_rank=40,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 0.8,
            },
        )


@frozen(kw_only=True)
class DeepseekV3BidirectionalConfig(DeepseekV3Config):
    """config.json of a DeepSeek-V3 that sees whole texts."""

    is_causal: bool = field(default=False, validator=validators.in_((False,)))
    num_nextn_predict_layers: int = size(0, least=0)


class DeepseekV3BidirectionalModel(TextVectors, DeepseekV3ForCausalLM):
    """DeepSeek-V3 that sees whole texts (Giga-Embeddings): vectors, by default their mean."""

    config_type: ClassVar[type] = DeepseekV3BidirectionalConfig
    oracle = "modulm_deepseek.oracle:BothWays"

    @property
    def pooling(self) -> str:
        return "MEAN"

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        names = {"architectures": ["DeepseekV3BidirectionalModel"], "is_causal": False}
        return {**super().tiny(), **names}
