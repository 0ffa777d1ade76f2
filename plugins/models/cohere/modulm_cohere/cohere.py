"""Command R and Command A (Cohere, 2024; arXiv 2504.00698): parallel branches, norms without bias.

In Command A (Cohere2), three of four layers have a window; the fourth has no positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen
from torch import Tensor

from modulm.nn import Builder, Head, Norm
from modulm_layers import (
    Attention,
    DecoderConfig,
    DecoderForCausalLM,
    ParallelLayer,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["Cohere2Config", "Cohere2ForCausalLM", "CohereConfig", "CohereForCausalLM"]


@frozen(kw_only=True)
class CohereConfig(DecoderConfig):
    """config.json of Command R."""

    ROPE_NEOX = False

    layer_norm_eps: float = 1e-5
    max_position_embeddings: int = size(8192)
    logit_scale: float = 0.0625
    tie_word_embeddings: bool = True
    use_qk_norm: bool = False


@frozen(kw_only=True)
class Cohere2Config(CohereConfig):
    """config.json of Command A; older files have a pattern instead of layer types."""

    sliding_window: int | None = size(4096)
    sliding_window_pattern: int = size(4)

    def layer_type(self, index: int) -> str:
        if self.layer_types is not None:
            return self.layer_types[index]
        full = (index + 1) % self.sliding_window_pattern == 0
        return "full_attention" if full else "sliding_attention"


class HeadNorm(Norm):
    """A layer norm over each head, with a weight per head: [heads, head_dim]."""

    weight: Tensor

    def __init__(self, b: Builder, name: str, heads: int, width: int, eps: float) -> None:
        super().__init__()
        self.ops, self.eps = b.ops, eps
        b.cut_parameter(f"{name}.weight", self, "weight", (b.shard(heads, 1),), (width,))

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, heads, head_dim]."""
        normed: Tensor = self.ops.layer_norm(x, self.weight, None, self.eps)
        return normed


def _attention(c: CohereConfig, b: Builder, index: int) -> Attention:
    """Interleaved rotary attention; Command A's full layers have no positions."""
    at = b.at("self_attn")
    norms = None
    if c.use_qk_norm:
        q_norm = HeadNorm(at, "q_norm", c.heads, c.head_size, c.layer_norm_eps)
        norms = (q_norm, HeadNorm(at, "k_norm", c.kv_heads, c.head_size, c.layer_norm_eps))
    rope = None if c.layer_type(index) == "full_attention" else c.rope(c.layer_type(index))
    return standard_attention(c, b, index, rope=rope, qk_norm=norms)


class CohereLayer(ParallelLayer):
    """Parallel branches on one norm."""

    def __init__(self, c: CohereConfig, b: Builder, index: int) -> None:
        norm = b.layer_norm("input_layernorm", c.hidden_size, c.layer_norm_eps, bias=False)
        super().__init__(norm, _attention(c, b, index), standard_mlp(c, b))


class CohereForCausalLM(DecoderForCausalLM):
    """Command R with a language-model head."""

    api = 1
    config_type = CohereConfig
    layer = CohereLayer

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.layer_norm("norm", config.hidden_size, config.layer_norm_eps, bias=False)

    def make_head(self, config: Any, b: Builder) -> Head:
        tied = self.embed if config.tie_word_embeddings else None
        scale = config.logit_scale
        return b.head("lm_head", config.hidden_size, config.vocab_size, tied=tied, scale=scale)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("cohere", "CohereForCausalLM", use_qk_norm=True, logit_scale=0.8)


class Cohere2ForCausalLM(CohereForCausalLM):
    """Command A with a language-model head."""

    config_type = Cohere2Config

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "cohere2",
            "Cohere2ForCausalLM",
            sliding_window=12,
            logit_scale=0.8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
