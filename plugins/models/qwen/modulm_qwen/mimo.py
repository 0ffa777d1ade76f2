"""MiMo 7B (Xiaomi, arXiv 2505.07608): Qwen 2's layers, plus one that drafts tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm.contracts.model import MtpLayer
from modulm.nn import WeightNames
from modulm_layers import size, tiny_config
from modulm_qwen.qwen2 import Qwen2Config, Qwen2ForCausalLM, Qwen2Layer

__all__ = ["MiMoConfig", "MiMoForCausalLM"]


@frozen(kw_only=True)
class MiMoConfig(Qwen2Config):
    """config.json of MiMo 7B: Qwen 2's keys, and the number of drafting layers."""

    sliding_window: int | None = size(4096, least=0)
    num_nextn_predict_layers: int = size(0, least=0)


class MiMoForCausalLM(Qwen2ForCausalLM):
    """MiMo 7B with a language-model head; an additional layer drafts tokens (`mtp`)."""

    config_type = MiMoConfig
    names = WeightNames(ignore=(r"^model\.mtp_layers\.",))
    oracle = "modulm_qwen.oracle:AsQwen2"

    @classmethod
    def mtp(cls, config: MiMoConfig) -> MtpLayer | None:
        c, at = config, "model.mtp_layers.0"
        if not c.num_nextn_predict_layers:
            return None
        return MtpLayer(
            layer=lambda b: Qwen2Layer(c, b, 0),
            at=at,
            hidden=c.hidden_size,
            eps=c.rms_norm_eps,
            embedding_norm=f"{at}.token_layernorm",
            hidden_norm=f"{at}.hidden_layernorm",
            project=f"{at}.input_proj",
            norm=f"{at}.final_layernorm",
            state_first=True,
            normed=True,
        )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        windows = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
        return tiny_config("mimo", "MiMoForCausalLM", **windows)
