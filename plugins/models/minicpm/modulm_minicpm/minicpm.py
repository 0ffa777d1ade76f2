"""MiniCPM 1, 2 and 4 (arXiv 2404.06395): Llama's block with multipliers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attrs import frozen
from torch import Tensor

from modulm.contracts.model import Batch
from modulm.nn import Builder, Embedding, Head
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["MiniCPMConfig", "MiniCPMForCausalLM", "MiniCPMLayer"]


@frozen(kw_only=True)
class MiniCPMConfig(DecoderConfig):
    """config.json of MiniCPM: multipliers of embeddings, branches and logits.

    `sparse_config` (MiniCPM 4), a faster approximation for long prompts, is ignored: attention is
    exact. MiniCPM-MoE is rejected.
    """

    scale_emb: float = 1.0
    scale_depth: float = 1.0
    dim_model_base: int = size(1)
    num_experts: int = size(0, least=0)
    tie_word_embeddings: bool = True

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.num_experts:
            raise ValueError(f"num_experts: not supported yet: {self.num_experts} experts")

    @property
    def branch_multiplier(self) -> float:
        """The factor of each branch before it is added."""
        return self.scale_depth / math.sqrt(self.num_hidden_layers)


class MiniCPMLayer(PreNormLayer):
    """The pre-norm block with scaled branches."""

    def __init__(self, c: MiniCPMConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )
        self.ops, self.multiplier = b.ops, c.branch_multiplier

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden]."""
        x, residual = self.attn_norm.add(x, residual)
        attended = self.ops.scale(self.attn(x, batch), self.multiplier)
        x, residual = self.mlp_norm.add(attended, residual)
        return self.ops.scale(self.mlp(x), self.multiplier), residual


class MiniCPMForCausalLM(DecoderForCausalLM):
    """MiniCPM with a language-model head."""

    api = 1
    config_type = MiniCPMConfig
    layer = MiniCPMLayer
    oracle = "modulm_minicpm.oracle:AsGranite"

    def make_embedding(self, config: Any, b: Builder) -> Embedding:
        embedding = b.embedding(
            "embed_tokens", config.vocab_size, config.hidden_size, scale=config.scale_emb
        )
        embedding.scales_given = True
        return embedding

    def make_head(self, config: Any, b: Builder) -> Head:
        tied = self.embed if config.tie_word_embeddings else None
        scale = config.dim_model_base / config.hidden_size
        return b.head("lm_head", config.hidden_size, config.vocab_size, tied=tied, scale=scale)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "minicpm",
            "MiniCPMForCausalLM",
            scale_emb=3.0,
            scale_depth=1.4,
            dim_model_base=40,
            tie_word_embeddings=False,
        )
