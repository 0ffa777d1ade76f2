"""Grok 1 (xAI, 2024): eight experts of which two compute, a norm before and after each branch.

Weight names are those of the published PyTorch conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.nn import Builder, Embedding, Head, WeightNames
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    ExpertNames,
    MoE,
    Routing,
    SandwichLayer,
    only,
    size,
    standard_attention,
    tiny_config,
)

__all__ = ["Grok1Config", "Grok1ForCausalLM", "Grok1Layer"]


@frozen(kw_only=True)
class Grok1Config(DecoderConfig):
    """config.json of Grok 1.

    attn_output_multiplier: the scale of attention scores; max_attn_value bounds them by tanh.
    embedding_multiplier_scale, output_multiplier_scale: those of embeddings and logits.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "max_attn_val": "max_attn_value",
        "attn_logit_softcapping": "max_attn_value",
    }

    hidden_act: str = "gelu"
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = size(8192)
    tie_word_embeddings: bool = True
    attn_output_multiplier: float = 0.08838834764831845
    max_attn_value: float = 30.0
    embedding_multiplier_scale: float = 78.38367176906169
    output_multiplier_scale: float = 0.5773502691896257
    num_experts: int = size(8)
    num_experts_per_tok: int = size(2)
    residual_moe: bool = False

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(self, residual_moe=(False,))
        self.routing.check(self.num_experts)

    @property
    def routing(self) -> Routing:
        """Softmax routing."""
        return Routing(self.num_experts_per_tok, renormalise=False)


class Grok1Layer(SandwichLayer):
    """norm, attention, norm, add; norm, experts, norm, add."""

    def __init__(self, c: Grok1Config, b: Builder, index: int) -> None:
        def norm(name: str) -> Any:
            return b.rms_norm(name, c.hidden_size, c.rms_norm_eps)

        names = ExpertNames(gate="linear", up="linear_v", down="linear_1")
        super().__init__(
            norm("pre_attn_norm"),
            standard_attention(
                c,
                b,
                index,
                at="attn",
                scale=c.attn_output_multiplier,
                softcap=c.max_attn_value,
            ),
            norm("post_attn_norm"),
            norm("pre_moe_norm"),
            MoE(
                b.at("moe_block"),
                hidden=c.hidden_size,
                inner=c.inner_size,
                experts=c.num_experts,
                routing=c.routing,
                act=c.hidden_act,
                names=names,
            ),
            norm("post_moe_norm"),
        )


class Grok1ForCausalLM(DecoderForCausalLM):
    """Grok 1 with a language-model head."""

    api = 1
    config_type = Grok1Config
    layer = Grok1Layer
    names = WeightNames(rename=((r"norm\.scale$", "norm.weight"),))
    oracle = "modulm_grok.oracle:Plain"

    def make_embedding(self, config: Any, b: Builder) -> Embedding:
        scale = config.embedding_multiplier_scale
        return b.embedding("embed_tokens", config.vocab_size, config.hidden_size, scale=scale)

    def make_head(self, config: Any, b: Builder) -> Head:
        tied = self.embed if config.tie_word_embeddings else None
        scale = config.output_multiplier_scale
        return b.head("lm_head", config.hidden_size, config.vocab_size, tied=tied, scale=scale)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "grok-1",
            "Grok1ModelForCausalLM",
            num_experts=6,
            attn_output_multiplier=0.25,
            embedding_multiplier_scale=3.0,
            output_multiplier_scale=0.6,
            max_attn_value=2.0,
        )
