"""Models with Ling's layers: Ling 1 (arXiv 2503.05139), Param 2 (BharatGen), Sarvam 30B."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor

from modulm.nn import Rewrite, WeightNames
from modulm_bailing.bailing import BailingMoeV2Config, BailingMoeV2ForCausalLM
from modulm_layers import RoutedConfig, Routing, only, size

__all__ = ["BailingMoeForCausalLM", "Param2MoEForCausalLM", "SarvamMoEForCausalLM"]


@frozen(kw_only=True)
class BailingMoeConfig(BailingMoeV2Config):
    """config.json of Ling 1: experts are scored by a softmax, without a bias for the choice."""

    use_qk_norm: bool = False
    score_function: str = "softmax"
    moe_router_enable_expert_bias: bool = False
    norm_head: bool = False

    def __attrs_post_init__(self) -> None:
        RoutedConfig.__attrs_post_init__(self)
        only(
            self,
            use_bias=(False,),
            use_qk_norm=(False,),
            score_function=("softmax",),
            moe_router_enable_expert_bias=(False,),
            n_group=(1,),
            moe_shared_expert_intermediate_size=(None, self.shared_size),
        )

    @property
    def routing(self) -> Routing:
        """Softmax routing."""
        scale = self.routed_scaling_factor
        return Routing(self.num_experts_per_tok, renormalise=self.norm_topk_prob, scale=scale)


def _unit(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Normalize the columns of the LM head."""
    yield name, F.normalize(tensor.float(), dim=0, eps=1e-7)


class BailingMoeForCausalLM(BailingMoeV2ForCausalLM):
    """Ling 1 with a language-model head, whose columns have length 1 with `norm_head`."""

    config_type = BailingMoeConfig
    oracle = "modulm_bailing.oracle:AsQwen2Moe"

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        rewrite = (Rewrite(r"^lm_head\.weight$", _unit),) if config.norm_head else ()
        return evolve(names, rewrite=rewrite)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        table = dict(super().tiny())
        for key in ("n_group", "topk_group", "use_qkv_bias", "partial_rotary_factor", "head_dim"):
            del table[key]
        return {
            **table,
            "architectures": ["BailingMoeForCausalLM"],
            "model_type": "bailing_moe",
            "num_shared_experts": 2,
            "routed_scaling_factor": 1.0,
        }


@frozen(kw_only=True)
class Param2MoEConfig(BailingMoeV2Config):
    """config.json of Param 2: the width of shared experts is that of all of them.

    Their own code subtracts the mean from the bias for the choice, which does not change it.
    """

    first_k_dense_replace: int = size(1, least=0)
    num_nextn_predict_layers: int = size(0, least=0)

    @property
    def shared_size(self) -> int:
        return self.moe_intermediate_size * (self.n_shared_experts or 1)


class Param2MoEForCausalLM(BailingMoeV2ForCausalLM):
    """Param 2 with a language-model head."""

    config_type = Param2MoEConfig

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            **super().tiny(),
            "architectures": ["Param2MoEForCausalLM"],
            "model_type": "param2moe",
            "num_shared_experts": 2,
            "moe_shared_expert_intermediate_size": 64,
        }


class SarvamMoEForCausalLM(BailingMoeV2ForCausalLM):
    """Sarvam 30B with a language-model head."""

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        names = {"architectures": ["SarvamMoEForCausalLM"], "model_type": "sarvam_moe"}
        return {**super().tiny(), **names}
