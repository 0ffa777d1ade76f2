"""K2 Horizon (IFM, 2026): experts for the feed-forward part and for the values of attention, norms
over parts of the stream, and a gate on attention that is not bounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from attrs import asdict, evolve, frozen
from torch import Tensor
from torch.nn import Module, ModuleList
from torch.nn import functional as F

from modulm.contracts.quantization import Shard
from modulm.nn import Builder, Norm
from modulm_layers import (
    Attention,
    AttentionNames,
    DecoderConfig,
    DecoderForCausalLM,
    ExpertChoice,
    ExpertNames,
    GatedMLP,
    MoE,
    PreNormLayer,
    Rope,
    Routing,
    only,
    size,
    standard_mlp,
    tiny_config,
)

__all__ = ["K2HorizonConfig", "K2HorizonForCausalLM", "K2HorizonLayer"]

_NAMES = ExpertNames(choice_bias="gate.bias")


@frozen(kw_only=True)
class K2HorizonConfig(DecoderConfig):
    """config.json of K2 Horizon.

    rope_head_dim: dimensions of a head that are rotated. layernorm_num_groups: parts of the stream
    with a norm of their own. mova_*: experts for values, in layers that have experts.
    moe_gate_bias: whether a stored bias is added to the scores for the choice.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}

    max_position_embeddings: int = size(8192)
    rope_head_dim: int | None = size(None)
    query_key_norm: bool = False
    attention_gate_func: str | None = None
    layernorm_num_groups: int = size(1)
    num_experts: int = size(least=0)
    num_experts_per_tok: int = size()
    num_shared_experts: int = size(0, least=0)
    moe_intermediate_size: int = size()
    norm_topk_prob: bool = True
    moe_gate_bias: bool = False
    router_score_func: str = "softmax"
    router_scaling_factor: float | None = None
    mova_num_experts: int = size(0, least=0)
    mova_num_experts_per_tok: int = size(1)
    decoder_sparse_step: int = size(1)
    mlp_only_layers: tuple[int, ...] = ()
    dual_chunk_attention_config: dict[str, Any] | None = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(
            self,
            attention_gate_func=(None, "silu", "softplus"),
            dual_chunk_attention_config=(None,),
            router_score_func=("softmax", "sigmoid"),
        )
        if self.hidden_size % self.layernorm_num_groups:
            raise ValueError(
                f"layernorm_num_groups: {self.layernorm_num_groups} parts of {self.hidden_size}"
            )

    def sparse(self, index: int) -> bool:
        """Whether layer `index` has experts."""
        step = (index + 1) % self.decoder_sparse_step == 0
        return bool(self.num_experts) and step and index not in self.mlp_only_layers

    def routing(self, top_k: int, renormalise: bool) -> Routing:
        """How tokens choose `top_k` experts."""
        scale = 1.0 if self.router_scaling_factor is None else self.router_scaling_factor
        return Routing(top_k, self.router_score_func, renormalise=renormalise, scale=scale)

    def rope(self, layer_type: str = "") -> Rope:
        """Pair the halves of whole heads; pairs beyond `rope_head_dim` stand still."""
        rope, width = super().rope(layer_type), self.head_size
        turned = self.rope_head_dim or width
        if turned == width:
            return rope
        if rope.kind != "default" or turned % 2 or turned > width:
            raise ValueError(f"rope_head_dim: {turned} of {width} with rope_type {rope.kind!r}")
        # Factors turn the angles of a whole head into those of the smaller one.
        moving = (rope.theta ** (2 * i / turned - 2 * i / width) for i in range(turned // 2))
        factors = (*moving, *[math.inf] * (width // 2 - turned // 2))
        return evolve(rope, kind="longrope", short_factors=factors, long_factors=factors)


class GroupNorm(Norm):
    """An RMS norm of each of `groups` parts; x: [..., size]."""

    weight: Tensor

    def __init__(
        self, b: Builder, name: str, width: int, groups: int, eps: float, shard: Shard | None = None
    ) -> None:
        super().__init__()
        self.ops, self.groups, self.eps = b.ops, groups, eps
        shard = Shard(0, width, width) if shard is None else shard
        b.cut_parameter(f"{name}.weight", self, "weight", (shard,))

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.unflatten(x.float(), -1, (self.groups, -1))
        normed = F.rms_norm(parts, parts.shape[-1:], eps=self.eps).flatten(-2)
        return (normed * self.weight.float()).to(x.dtype)


class HeadNorm(GroupNorm):
    """An RMS norm of each head, whose heads have weights of their own; x: [..., heads, size]."""

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = super().forward(x.flatten(-2))
        return normed.view(x.shape)


class MixedValues(ExpertChoice):
    """Queries and keys, and values that are sums over chosen experts, side by side."""

    def __init__(
        self,
        c: K2HorizonConfig,
        b: Builder,
        sizes: Mapping[str, int],
        least: tuple[int, int, int],
        names: AttentionNames,
    ) -> None:
        super().__init__()
        hidden, count = c.hidden_size, c.mova_num_experts
        both = {name: sizes[name] for name in (names.q, names.k)}
        self.qk = b.linear("qk_proj", hidden, both, bias=c.attention_bias, least=least[:2])
        self.router = b.router("v_router", hidden, count, wide=True)
        self.register_parameter("choice_bias", None)
        if c.moe_gate_bias:
            b.parameter("v_router.bias", self, "choice_bias", (count,), torch.float32)
        width = sizes[names.v]
        self.experts = ModuleList(
            b.linear(f"v_experts.{i}", hidden, width, least=least[2]) for i in range(count)
        )
        top_k = c.mova_num_experts_per_tok
        self.ops, self.routing = b.ops, asdict(c.routing(top_k, renormalise=top_k > 1))

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, queries + keys + values]."""
        qk = self.qk(x)
        weights, ids = self.choose(self.router(x))
        width = self.experts[0].spec.outputs
        values = torch.zeros(len(x), width, dtype=torch.float32, device=x.device)
        for expert in ids.unique().tolist():
            rows, choices = (ids == expert).nonzero(as_tuple=True)
            out = self.experts[expert](x[rows]).float()
            values.index_add_(0, rows, out * weights[rows, choices, None])
        return torch.cat([qk, values.to(qk.dtype)], dim=-1)


class HorizonAttention(Attention):
    """Attention with a gate on its output and, in some layers, experts for its values."""

    def __init__(self, c: K2HorizonConfig, b: Builder, index: int) -> None:
        self.config, self.mixes = c, c.sparse(index) and c.mova_num_experts > 0
        hidden, dim = c.hidden_size, c.head_size
        norms = None
        if c.query_key_norm:
            shards = b.shard(c.heads * dim, dim), b.shard(c.kv_heads * dim, dim)
            q, k = (
                HeadNorm(b, name, shard.total, shard.size // dim, c.rms_norm_eps, shard)
                for name, shard in zip(("q_norm", "k_norm"), shards, strict=True)
            )
            norms = q, k
        super().__init__(
            b,
            hidden=hidden,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=dim,
            rope=c.rope(),
            bias=c.attention_bias,
            out_bias=c.attention_bias,
            qk_norm=norms,
        )
        self.gates = None
        if c.attention_gate_func is not None:
            self.gates = b.linear("gate_proj", hidden, c.heads * dim, least=dim)

    def make_inputs(
        self,
        b: Builder,
        hidden: int,
        sizes: Mapping[str, int],
        bias: bool,
        least: tuple[int, int, int],
        names: AttentionNames,
    ) -> Module:
        if not self.mixes:
            return super().make_inputs(b, hidden, sizes, bias, least, names)
        return MixedValues(self.config, b, sizes, least, names)

    def project_out(self, out: Tensor, x: Tensor) -> Tensor:
        seen = out.flatten(1)
        if self.gates is not None:
            gate = self.gates(x).float()
            silu = self.config.attention_gate_func == "silu"
            gate = F.silu(gate) if silu else F.softplus(gate, beta=math.log(2))
            seen = (seen.float() * gate).to(seen.dtype)
        attended: Tensor = self.out(seen)
        return attended


def _experts(c: K2HorizonConfig, b: Builder) -> MoE:
    shared, inner = None, c.num_shared_experts * c.moe_intermediate_size
    if inner:
        shared = GatedMLP(b.at("shared_experts"), c.hidden_size, inner, c.hidden_act)
    return MoE(
        b,
        hidden=c.hidden_size,
        inner=c.moe_intermediate_size,
        experts=c.num_experts,
        routing=c.routing(c.num_experts_per_tok, c.norm_topk_prob),
        act=c.hidden_act,
        wide_router=True,
        choice_bias=c.moe_gate_bias,
        shared=shared,
        names=_NAMES,
    )


def _norm(c: K2HorizonConfig, b: Builder, name: str) -> Norm:
    return GroupNorm(b, name, c.hidden_size, c.layernorm_num_groups, c.rms_norm_eps)


class K2HorizonLayer(PreNormLayer):
    """The pre-norm block; sparse layers have experts in both branches."""

    def __init__(self, c: K2HorizonConfig, b: Builder, index: int) -> None:
        super().__init__(
            _norm(c, b, "input_layernorm"),
            HorizonAttention(c, b.at("self_attn"), index),
            _norm(c, b, "post_attention_layernorm"),
            _experts(c, b.at("mlp")) if c.sparse(index) else standard_mlp(c, b, bias=False),
        )


class K2HorizonForCausalLM(DecoderForCausalLM):
    """K2 Horizon with a language-model head."""

    api = 1
    config_type = K2HorizonConfig
    layer = K2HorizonLayer
    oracle = "modulm_horizon.oracle:Horizon"

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return _norm(config, b, "norm")

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "k2_horizon",
            "K2HorizonForCausalLM",
            head_dim=24,
            rope_head_dim=12,
            query_key_norm=True,
            attention_gate_func="softplus",
            layernorm_num_groups=4,
            num_experts=6,
            num_experts_per_tok=2,
            num_shared_experts=1,
            moe_intermediate_size=32,
            moe_gate_bias=True,
            router_score_func="sigmoid",
            router_scaling_factor=1.5,
            mova_num_experts=4,
            mova_num_experts_per_tok=2,
            mlp_only_layers=[0],
        )
