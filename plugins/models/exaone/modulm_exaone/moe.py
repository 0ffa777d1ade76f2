"""K-EXAONE (LG AI Research, 2025): routed experts plus a shared one in pre-norm layers.

Attention is EXAONE 4's: layers with a window have rotary positions, the others none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.contracts.model import MtpLayer
from modulm.errors import UnsupportedError
from modulm.nn import Builder, WeightNames
from modulm_exaone.exaone4 import check_pattern, exaone_attention, layer_kind
from modulm_layers import (
    DecoderForCausalLM,
    PreNormLayer,
    RoutedConfig,
    routed_experts,
    size,
    standard_mlp,
    tiny_config,
)

__all__ = ["ExaoneMoeConfig", "ExaoneMoeForCausalLM", "ExaoneMoeLayer"]

_FULL = "full_attention"


@frozen(kw_only=True)
class ExaoneMoeConfig(RoutedConfig):
    """config.json of K-EXAONE.

    Windows that vary by layer and gate limits (K-EXAONE 2.0) are rejected.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
    }

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = size(None)
    sliding_window_pattern: Any = 4
    n_shared_experts: int | None = size(1)
    first_k_dense_replace: int = size(1, least=0)
    routed_scaling_factor: float = 2.5
    num_nextn_predict_layers: int = size(1, least=0)
    sliding_windows: tuple[int, ...] | None = None
    swiglu_limits: tuple[float, ...] | None = None
    mtp_layer_types: tuple[str, ...] | None = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_pattern(self.sliding_window_pattern)
        windows = tuple(self.window(index) or 0 for index in range(self.num_hidden_layers))
        if self.sliding_windows is not None and self.sliding_windows != windows:
            raise ValueError("sliding_windows: not those of sliding_window and layer_types")
        if any(self.swiglu_limits or ()):
            raise ValueError("swiglu_limits: not supported yet")

    def layer_type(self, index: int) -> str:
        return layer_kind(self, self.sliding_window_pattern, index)


class ExaoneMoeLayer(PreNormLayer):
    """The pre-norm block; the first layers have no experts. `drafts`: a drafting layer has no
    experts and full attention.
    """

    def __init__(self, c: ExaoneMoeConfig, b: Builder, index: int, *, drafts: bool = False) -> None:
        dense = drafts or not c.sparse(index)
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            exaone_attention(c, b, _FULL if drafts else c.layer_type(index)),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b) if dense else routed_experts(c, b.at("mlp")),
        )


class ExaoneMoeForCausalLM(DecoderForCausalLM):
    """K-EXAONE with a language-model head; an additional layer drafts tokens (`mtp`)."""

    api = 1
    config_type = ExaoneMoeConfig
    layer = ExaoneMoeLayer
    names = WeightNames(
        rename=((r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),),
        ignore=(r"^mtp\.",),
    )

    @classmethod
    def mtp(cls, config: ExaoneMoeConfig) -> MtpLayer | None:
        c = config
        if not c.num_nextn_predict_layers:
            return None
        if (c.mtp_layer_types or (_FULL,))[0] != _FULL:
            raise UnsupportedError("mtp_layer_types: not supported yet: draft layers with a window")
        return MtpLayer(
            layer=lambda b: ExaoneMoeLayer(c, b, 0, drafts=True),
            at="mtp.layers.0",
            hidden=c.hidden_size,
            eps=c.rms_norm_eps,
            embedding_norm="mtp.pre_fc_norm_embedding",
            hidden_norm="mtp.pre_fc_norm_hidden",
            project="mtp.fc",
            norm="mtp.norm",
            normed=True,
        )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "exaone_moe",
            "ExaoneMoeForCausalLM",
            head_dim=24,
            sliding_window=12,
            sliding_window_pattern=2,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            n_group=4,
            topk_group=2,
        )
