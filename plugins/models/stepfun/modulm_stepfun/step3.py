"""Step 3 (StepFun, arXiv 2507.19427): queries factored through a small vector, one key head,
experts in most layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn import Module

from modulm.nn import Builder, Rewrite, WeightNames
from modulm_layers import (
    Attention,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLP,
    MoE,
    PreNormLayer,
    Routing,
    only,
    size,
    standard_mlp,
    tiny_config,
)

__all__ = [
    "Step3Config",
    "Step3Layer",
    "Step3TextForCausalLM",
    "layer_indices",
    "split_stack",
]


def layer_indices(value: Any) -> tuple[int, ...] | None:
    """Return layers from a list or from numbers between commas."""
    if isinstance(value, str):
        value = [int(part) for part in value.split(",")]
    return None if value is None else tuple(value)


@frozen(kw_only=True)
class Step3Config(DecoderConfig):
    """config.json of Step 3's text model.

    share_q_dim: width of the vector that queries are computed from. moe_layers_enum: layers with
    experts; by default all but the first. norm_expert_weight: weights of chosen experts sum to 1.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "max_position_embedding": "max_position_embeddings",
        "num_attention_groups": "num_key_value_heads",
    }

    rms_norm_eps: float = 1e-5
    num_key_value_heads: int | None = size(1)
    head_dim: int | None = size(256)
    max_position_embeddings: int = size(65536)
    share_q_dim: int | None = size(None)
    moe_num_experts: int = size(48)
    moe_top_k: int = size(3)
    moe_intermediate_size: int = size(5120)
    share_expert_dim: int = size(5120)
    norm_expert_weight: bool = False
    moe_layers_enum: Any = field(default=None, converter=layer_indices)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(self, num_key_value_heads=(1,), attention_bias=(False,))
        self.routing.check(self.moe_num_experts)

    @property
    def routing(self) -> Routing:
        """Softmax routing."""
        return Routing(self.moe_top_k, renormalise=self.norm_expert_weight)

    def sparse(self, index: int) -> bool:
        """Whether layer `index` has experts."""
        return index > 0 if self.moe_layers_enum is None else index in self.moe_layers_enum


class _Projection(Module):
    """Queries, from a normed vector of width `shared`, beside the key and the value."""

    def __init__(self, b: Builder, hidden: int, shared: int, queries: int, dim: int) -> None:
        super().__init__()
        parts = {"q_proj": shared, "k_proj": dim, "v_proj": dim}
        self.shared = shared
        self.down = b.linear("qkv_proj", hidden, parts, split=False)
        self.norm = b.rms_norm("inter_norm", shared, 1e-5)
        self.up = b.linear("wq", shared, queries)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, queries + 2 dim]."""
        down = self.down(x)
        q = self.up(self.norm(down[:, : self.shared]))
        return torch.cat([q, down[:, self.shared :]], dim=-1)


@frozen(eq=False)
class _Factored(Builder):
    """A builder whose attention layers project with `_Projection`."""

    shared_width: int = 0

    def linear(self, name: str, inputs: int, outputs: Any, **more: Any) -> Any:
        q, k, _ = outputs.values()
        return _Projection(Builder(self.shared, self.prefix), inputs, self.shared_width, q, k)


class Step3Layer(PreNormLayer):
    """The pre-norm block; sparse layers have experts and a shared one."""

    def __init__(self, c: Step3Config, b: Builder, index: int) -> None:
        hidden, at = c.hidden_size, b.at("self_attn")
        attention = Attention(
            _Factored(at.shared, at.prefix, c.share_q_dim or c.head_size),
            hidden=hidden,
            heads=c.heads,
            kv_heads=1,
            head_dim=c.head_size,
            rope=c.rope(c.layer_type(index)),
        )
        super().__init__(
            b.rms_norm("input_layernorm", hidden, c.rms_norm_eps),
            attention,
            b.rms_norm("post_attention_layernorm", hidden, c.rms_norm_eps),
            _experts(c, b) if c.sparse(index) else standard_mlp(c, b),
        )


def _experts(c: Step3Config, b: Builder) -> MoE:
    hidden = c.hidden_size
    return MoE(
        b.at("moe"),
        hidden=hidden,
        inner=c.moe_intermediate_size,
        experts=c.moe_num_experts,
        routing=c.routing,
        act=c.hidden_act,
        shared=GatedMLP(b.at("share_expert"), hidden, c.share_expert_dim, c.hidden_act),
    )


def split_stack(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split the stack of a projection [experts, outputs, inputs]."""
    at, _, part = name.removesuffix(".weight").rpartition(".")
    for expert, weight in enumerate(tensor):
        yield f"{at}.experts.{expert}.{part}.weight", weight


class Step3TextForCausalLM(DecoderForCausalLM):
    """Step 3 (text) with a language-model head."""

    api = 1
    config_type = Step3Config
    layer = Step3Layer
    names = WeightNames(rewrite=(Rewrite(r"\.moe\.(gate|up|down)_proj\.weight$", split_stack),))
    oracle = "modulm_stepfun.oracle:AsMixtral"

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "step3_text",
            "Step3TextForCausalLM",
            num_key_value_heads=1,
            head_dim=24,
            share_q_dim=40,
            moe_num_experts=6,
            moe_top_k=2,
            moe_intermediate_size=32,
            share_expert_dim=48,
            norm_expert_weight=True,
            moe_layers_enum="1,2",
        )
