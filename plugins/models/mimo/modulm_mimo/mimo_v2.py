"""MiMo V2 Flash and Pro (Xiaomi, 2025 and 2026): sliding layers with sinks and twice the key heads,
values narrower than keys, experts scored by sigmoids, and a layer that drafts tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.model import MtpLayer
from modulm.nn import Builder, WeightNames
from modulm_layers import (
    Attention,
    DecoderForCausalLM,
    PreNormLayer,
    Rope,
    RoutedConfig,
    Routing,
    only,
    parse_rope,
    routed_experts,
    size,
    standard_mlp,
    tiny_config,
)

__all__ = ["MiMoV2Config", "MiMoV2FlashForCausalLM", "MiMoV2Layer"]

_FULL, _SLIDING = "full_attention", "sliding_attention"
_MTP = "model.mtp.layers.0"


@frozen(kw_only=True)
class MiMoV2Config(RoutedConfig):
    """config.json of MiMo V2, as published or as transformers writes it.

    hybrid_layer_pattern: 1 for layers with a window. moe_layer_freq: 1 for layers with experts.
    sliding_window_size: tokens before a token that it sees in those layers; `sliding_window` counts
    the token as well. swa_*: sizes in layers with a window, by default those of the others with
    twice the key heads. attention_value_scale multiplies the values; null means 1.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "layernorm_epsilon": "rms_norm_eps",
        "num_local_experts": "n_routed_experts",
    }

    head_dim: int | None = size(192)
    v_head_dim: int = size(128)
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = size(129)
    sliding_window_size: int | None = size(None)
    hybrid_layer_pattern: tuple[int, ...] | None = None
    moe_layer_freq: tuple[int, ...] | None = None
    swa_num_attention_heads: int | None = size(None)
    swa_num_key_value_heads: int | None = size(None)
    swa_head_dim: int | None = size(None)
    swa_v_head_dim: int | None = size(None)
    rope_theta: float = 5e6
    swa_rope_theta: float = 1e4
    partial_rotary_factor: float = 0.334
    attention_value_scale: float | None = None
    routed_scaling_factor: float | None = 1.0  # type: ignore[assignment]
    add_swa_attention_sink_bias: bool = True
    add_full_attention_sink_bias: bool = False
    attention_projection_layout: str | None = None
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    quantization_config: dict[str, Any] | None = None

    def __attrs_post_init__(self) -> None:
        for name, pattern, kinds in (
            ("layer_types", self.hybrid_layer_pattern, (_FULL, _SLIDING)),
            ("mlp_layer_types", self.moe_layer_freq, ("dense", "sparse")),
        ):
            if getattr(self, name) is None and pattern is not None:
                object.__setattr__(self, name, tuple(kinds[bool(each)] for each in pattern))
        if self.layer_types is None:
            kinds = tuple(
                _FULL if not index or not (index + 1) % 6 else _SLIDING
                for index in range(self.num_hidden_layers)
            )
            object.__setattr__(self, "layer_types", kinds)
        super().__attrs_post_init__()
        if set(self.layer_types or ()) - {_FULL, _SLIDING}:
            raise ValueError(f"layer_types: known are {_FULL}, {_SLIDING}")
        only(
            self,
            add_full_attention_sink_bias=(False,),
            attention_projection_layout=(None, "split_qkv", "fused_qkv"),
            n_shared_experts=(None, 0),
            scoring_func=("sigmoid",),
            topk_method=("noaux_tc",),
        )
        if self.attention_projection_layout == "fused_qkv" and self.quantization_config:
            raise ValueError(
                "attention_projection_layout: not supported yet: 'fused_qkv' in a quantized "
                "checkpoint, whose scales cross from keys to values; use one in bfloat16"
            )

    def sparse(self, index: int) -> bool:
        return index > 0 if self.mlp_layer_types is None else super().sparse(index)

    @property
    def routing(self) -> Routing:
        scale = self.routed_scaling_factor
        return evolve(super().routing, scale=1.0 if scale is None else scale)

    @property
    def reach(self) -> int | None:
        """Tokens that a token sees in layers with a window, itself included."""
        before = self.sliding_window_size
        return self.sliding_window if before is None else before + 1

    def window(self, index: int) -> int | None:
        return self.reach if self.layer_type(index) == _SLIDING else None

    def rope(self, layer_type: str = "") -> Rope:
        """Return the positions of the layers of one type."""
        sliding = layer_type == _SLIDING
        table = dict((self.rope_parameters or {}).get(layer_type) or self.rope_scaling or {})
        table.setdefault("rope_theta", self.swa_rope_theta if sliding else self.rope_theta)
        table.setdefault("partial_rotary_factor", self.partial_rotary_factor)
        return parse_rope(
            table,
            head_size=(self.swa_head_dim if sliding else None) or self.head_size,
            max_positions=self.max_position_embeddings,
        )

    def attention(self, b: Builder, index: int) -> MiMoV2Attention:
        """Make the attention of layer `index`. -1: that of the layer that drafts."""
        if index >= 0 and self.layer_type(index) == _FULL:
            return MiMoV2Attention(
                self, b, _FULL, None, (self.heads, self.kv_heads), (self.head_size, self.v_head_dim)
            )
        heads = self.swa_num_attention_heads or self.heads
        kv_heads = self.swa_num_key_value_heads or 2 * self.kv_heads
        dims = self.swa_head_dim or self.head_size, self.swa_v_head_dim or self.v_head_dim
        return MiMoV2Attention(self, b, _SLIDING, self.reach, (heads, kv_heads), dims)


class MiMoV2Attention(Attention):
    """Attention with narrow values, which are scaled; with a sink per head where it has a window.

    heads: of queries and of keys. dims: of a head's keys and of its values.
    """

    def __init__(
        self,
        c: MiMoV2Config,
        b: Builder,
        kind: str,
        window: int | None,
        heads: tuple[int, int],
        dims: tuple[int, int],
    ) -> None:
        super().__init__(
            b,
            hidden=c.hidden_size,
            heads=heads[0],
            kv_heads=heads[1],
            head_dim=dims[0],
            value_dim=dims[1],
            rope=c.rope(kind),
            bias=c.attention_bias,
            window=window,
            sinks=kind == _SLIDING and c.add_swa_attention_sink_bias,
        )
        self.factor = 1.0 if c.attention_value_scale is None else c.attention_value_scale
        self.fusable = False

    def _project(
        self, qkv: Tensor, positions: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super()._project(qkv, positions, table)
        return q, k, v * self.factor


class MiMoV2Layer(PreNormLayer):
    """The pre-norm block; the first layer has no experts."""

    def __init__(self, c: MiMoV2Config, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            c.attention(b.at("self_attn"), index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            routed_experts(c, b.at("mlp")) if c.sparse(index) else standard_mlp(c, b),
        )


def _draft_layer(c: MiMoV2Config, b: Builder) -> PreNormLayer:
    return PreNormLayer(
        b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
        c.attention(b.at("self_attn"), -1),
        b.rms_norm("pre_mlp_layernorm", c.hidden_size, c.rms_norm_eps),
        standard_mlp(c, b),
    )


class MiMoV2FlashForCausalLM(DecoderForCausalLM):
    """MiMo V2 with a language-model head; an additional layer drafts tokens (`mtp`)."""

    api = 1
    config_type = MiMoV2Config
    layer = MiMoV2Layer
    names = WeightNames(
        ignore=(r"^model\.mtp\.",),
        rename=((r"\.self_attn\.attention_sink_bias$", ".self_attn.sinks"),),
    )

    @classmethod
    def mtp(cls, config: MiMoV2Config) -> MtpLayer | None:
        return MtpLayer(
            layer=lambda b: _draft_layer(config, b),
            at=_MTP,
            hidden=config.hidden_size,
            eps=config.rms_norm_eps,
            embedding_norm=f"{_MTP}.enorm",
            hidden_norm=f"{_MTP}.hnorm",
            project=f"{_MTP}.eh_proj",
            norm=f"{_MTP}.final_layernorm",
            normed=True,
        )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "mimo_v2_flash",
            "MiMoV2FlashForCausalLM",
            head_dim=24,
            v_head_dim=16,
            sliding_window=12,
            n_routed_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            layer_types=[_FULL, _SLIDING, _SLIDING],
            mlp_layer_types=["dense", "sparse", "sparse"],
        )
