"""Snowflake Arctic (2024): a dense model with experts beside it in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch
from modulm.nn import Builder
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    ExpertNames,
    GatedMLP,
    MoE,
    Routing,
    only,
    size,
    standard_attention,
    tiny_config,
)

__all__ = ["ArcticConfig", "ArcticForCausalLM", "ArcticLayer"]

_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}


@frozen(kw_only=True)
class ArcticConfig(DecoderConfig):
    """config.json of Arctic: every `moe_layer_frequency`-th layer has experts.

    use_residual: such a layer also has a dense block.
    """

    rms_norm_eps: float = 1e-5
    rope_theta: float = 1_000_000.0
    max_position_embeddings: int = size(4096)
    num_local_experts: int = size(8)
    num_experts_per_tok: int = size(1)
    moe_layer_frequency: int = size(2)
    use_residual: bool = False
    parallel_attn_mlp_res: bool = False

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(self, parallel_attn_mlp_res=(self.use_residual,))
        self.routing.check(self.num_local_experts)

    @property
    def routing(self) -> Routing:
        """Softmax routing."""
        return Routing(self.num_experts_per_tok, renormalise=self.num_experts_per_tok > 1)

    def sparse(self, index: int) -> bool:
        """Whether layer `index` has experts."""
        return (index + 1) % self.moe_layer_frequency == 0


class ArcticLayer(Module):
    """Attention, then a dense block or experts.

    With `use_residual`, experts read the layer's input, and a dense block the attention's output.
    """

    def __init__(self, c: ArcticConfig, b: Builder, index: int) -> None:
        super().__init__()
        hidden, eps, at = c.hidden_size, c.rms_norm_eps, b.at("block_sparse_moe")
        self.ops = b.ops
        self.attn_norm = b.rms_norm("input_layernorm", hidden, eps)
        self.attn = standard_attention(c, b, index)
        self.mlp_norm = b.rms_norm("post_attention_layernorm", hidden, eps)
        self.dense: Module | None = None
        if not c.sparse(index):
            self.mlp: Module = GatedMLP(at.at("mlp"), hidden, c.inner_size, c.hidden_act, **_NAMES)
            return
        self.mlp = MoE(
            at,
            hidden=hidden,
            inner=c.inner_size,
            experts=c.num_local_experts,
            routing=c.routing,
            act=c.hidden_act,
            names=ExpertNames(**_NAMES),
        )
        if c.use_residual:
            self.dense_norm = b.rms_norm("residual_layernorm", hidden, eps)
            self.dense = GatedMLP(b.at("residual_mlp"), hidden, hidden, c.hidden_act, **_NAMES)

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden]."""
        x, stream = self.attn_norm.add(x, residual)
        if self.dense is None:
            x, stream = self.mlp_norm.add(self.attn(x, batch), stream)
            return self.mlp(x), stream
        mixed = self.mlp(self.mlp_norm(stream))
        x, stream = self.dense_norm.add(self.attn(x, batch), stream)
        return self.ops.add(mixed, self.dense(x)), stream


class ArcticForCausalLM(DecoderForCausalLM):
    """Arctic with a language-model head."""

    api = 1
    config_type = ArcticConfig
    layer = ArcticLayer
    oracle = "modulm_arctic.oracle:AsMixtral"

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "arctic",
            "ArcticForCausalLM",
            num_hidden_layers=4,
            num_local_experts=6,
            num_experts_per_tok=2,
            use_residual=True,
            parallel_attn_mlp_res=True,
        )
