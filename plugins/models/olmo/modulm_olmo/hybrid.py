"""OLMo Hybrid (Ai2, 2026): gated delta rules, and OLMo 2's block in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.model import Batch, StateSpec
from modulm.nn import Builder, WeightNames
from modulm_layers import (
    CausalConv,
    DecoderForCausalLM,
    PreNormLayer,
    size,
    standard_mlp,
    tiny_config,
)
from modulm_olmo.olmo2 import Olmo2Config, Olmo2Layer

__all__ = ["DeltaNet", "OlmoHybridConfig", "OlmoHybridForCausalLM", "olmo_hybrid_layer"]

_KINDS = {"full_attention", "linear_attention"}
#: Epsilon of the norm of the delta rule's output.
_EPS = 1e-5


@frozen(kw_only=True)
class OlmoHybridConfig(Olmo2Config):
    """config.json of OLMo Hybrid; `linear_` keys describe the delta-rule layers. Without a rotary
    base, attention has no positions.
    """

    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = size(65536)
    linear_num_key_heads: int | None = size(None)
    linear_num_value_heads: int | None = size(None)
    linear_key_head_dim: int | None = size(None)
    linear_value_head_dim: int | None = size(None)
    linear_conv_kernel_dim: int = size(4, least=2)
    linear_allow_neg_eigval: bool = True
    rope_theta: float | None = None  # type: ignore[assignment]

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        unknown = {self.layer_type(i) for i in range(self.num_hidden_layers)} - _KINDS
        if unknown:
            raise ValueError(f"layer_types: kinds are {sorted(_KINDS)}, got {sorted(unknown)}")
        keys, values, _, _ = self.delta
        if values % keys:
            raise ValueError("linear_num_key_heads: does not divide linear_num_value_heads")

    @property
    def delta(self) -> tuple[int, int, int, int]:
        """(key heads, value heads, key head size, value head size)."""
        keys = self.linear_num_key_heads or self.heads
        width = self.linear_key_head_dim or int(0.75 * self.hidden_size / keys)
        values = self.linear_num_value_heads or self.heads
        return keys, values, width, self.linear_value_head_dim or 2 * width

    @property
    def rotates(self) -> bool:
        """Whether attention has rotary positions."""
        rope_settings = self.rope_scaling or self.rope_parameters or {}
        return rope_settings.get("rope_theta", self.rope_theta) is not None

    def layer_type(self, index: int) -> str:
        if self.layer_types is not None:
            return self.layer_types[index]
        last = self.num_hidden_layers < 4 and index == self.num_hidden_layers - 1
        return "full_attention" if index % 4 == 3 or last else "linear_attention"


class DeltaNet(Module):
    """Linear attention with the gated delta rule (Yang et al., arXiv 2412.06464).

    If eigenvalues may be negative, a token's update strength is doubled.
    """

    a_log: Tensor
    dt_bias: Tensor

    def __init__(self, c: OlmoHybridConfig, b: Builder) -> None:
        super().__init__()
        key_heads, heads, self.key_dim, self.value_dim = c.delta
        self.key_heads, self.heads = b.share(key_heads, 1), b.share(heads)
        self.reach = 2.0 if c.linear_allow_neg_eigval else 1.0
        keys, values = key_heads * self.key_dim, heads * self.value_dim
        sizes = {"q_proj": keys, "k_proj": keys, "v_proj": values, "g_proj": values}
        least = [self.key_dim] * 2 + [self.value_dim] * 2
        self.widths = [
            b.share(size, smallest) for size, smallest in zip(sizes.values(), least, strict=True)
        ]
        self.project = b.linear("qkvg_proj", c.hidden_size, sizes, least=least)
        self.rates = b.linear("ba_proj", c.hidden_size, {"b_proj": heads, "a_proj": heads})
        width, act = c.linear_conv_kernel_dim, c.hidden_act
        self.convs = ModuleList(
            CausalConv(b, f"{n}_conv1d", [inner], width, bias=False, act=act, least=[smallest])
            for n, inner, smallest in zip("qkv", sizes.values(), least, strict=False)
        )
        for name, attribute in (("A_log", "a_log"), ("dt_bias", "dt_bias")):
            b.cut_parameter(name, self, attribute, (b.shard(heads),), dtype=torch.float32)
        self.norm = b.rms_norm("o_norm", self.value_dim, _EPS)
        self.out = b.row_linear("o_proj", values, c.hidden_size)
        shapes = zip("qkv", self.widths, strict=False)
        conv_states = [(f"conv_{n}", (width - 1, inner), b.dtype) for n, inner in shapes]
        state = ("state", (self.heads, self.key_dim, self.value_dim), "float32")
        self.cache = b.cache(StateSpec((*conv_states, state)))
        self.ops = b.ops

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        cache, plan, tokens = batch.caches[self.cache], batch.plan(self.cache), x.shape[0]
        *parts, gate = self.project(x).split(self.widths, -1)
        q, k, v = (
            conv(part, cache[f"conv_{n}"], plan).view(tokens, heads, -1)
            for n, conv, part, heads in zip("qkv", self.convs, parts, self._heads, strict=True)
        )
        beta, step = self.rates(x).chunk(2, -1)
        rates = (beta, step, self.a_log, self.dt_bias)
        y = self.ops.delta_rule(q, k, v, *rates, cache["state"], plan, self.reach)
        norm = self.norm
        gated = self.ops.gated_rms_norm(
            y.flatten(1), gate, norm.weight, norm.eps, self.heads, norm_first=True
        )
        mixed: Tensor = self.out(gated)
        return mixed

    @property
    def _heads(self) -> tuple[int, int, int]:
        return self.key_heads, self.key_heads, self.heads


def olmo_hybrid_layer(c: OlmoHybridConfig, b: Builder, index: int) -> Module:
    """OLMo 2's block, or a delta rule in a pre-norm block."""
    if c.layer_type(index) == "full_attention":
        return Olmo2Layer(c, b, index, **({} if c.rotates else {"rope": None}))
    return PreNormLayer(
        b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
        DeltaNet(c, b.at("linear_attn")),
        b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
        standard_mlp(c, b),
    )


class OlmoHybridForCausalLM(DecoderForCausalLM):
    """OLMo Hybrid with a language-model head."""

    api = 1
    config_type = OlmoHybridConfig
    layer = staticmethod(olmo_hybrid_layer)
    names = WeightNames(
        rename=(
            (r"\.attention_layer_norm\.", ".input_layernorm."),
            (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
        )
    )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        # With equal numbers of keys and values, transformers stores the three convolutions as
        # thirds of one.
        return tiny_config(
            "olmo_hybrid",
            "OlmoHybridForCausalLM",
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=24,
            linear_value_head_dim=12,
        )
