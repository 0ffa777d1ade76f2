"""BioGPT (Luo et al., arXiv 2210.10341): learned positions offset by 2, scaled embeddings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen
from torch import Tensor

from modulm.nn import Builder, Head, Norm, Rewrite, WeightNames
from modulm_layers import (
    AttentionNames,
    DecoderConfig,
    DecoderForCausalLM,
    LearnedPositions,
    PlainMLP,
    PreNormLayer,
    size,
    standard_attention,
    tiny_config,
)

__all__ = ["BioGptConfig", "BioGptForCausalLM", "BioGptLayer"]

#: The file's `layer_norm_eps` is not the value used in training.
_EPS = 1e-5
_OFFSET = 2


@frozen(kw_only=True)
class BioGptConfig(DecoderConfig):
    """config.json of BioGPT."""

    hidden_act: str = "gelu"
    max_position_embeddings: int = size(1024)
    scale_embedding: bool = True
    tie_word_embeddings: bool = True


class BioGptLayer(PreNormLayer):
    """The pre-norm block; every projection has a bias."""

    def __init__(self, c: BioGptConfig, b: Builder, index: int) -> None:
        names = AttentionNames(out="out_proj")
        inner, act = c.inner_size, c.hidden_act
        super().__init__(
            b.layer_norm("self_attn_layer_norm", c.hidden_size, _EPS),
            standard_attention(c, b, index, rope=None, bias=True, out_bias=True, names=names),
            b.layer_norm("final_layer_norm", c.hidden_size, _EPS),
            PlainMLP(b, c.hidden_size, inner, act, up="fc1", down="fc2"),
        )


def _from_first(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Remove the rows before the first position from the table."""
    yield name, tensor[_OFFSET:]


class BioGptForCausalLM(DecoderForCausalLM):
    """BioGPT with a language-model head."""

    api = 1
    config_type = BioGptConfig
    layer = BioGptLayer
    root = "biogpt"
    names = WeightNames(rewrite=(Rewrite(r"embed_positions\.weight$", _from_first),))

    def make_embedding(self, config: Any, b: Builder) -> LearnedPositions:
        width = config.hidden_size
        scale = math.sqrt(width) if config.scale_embedding else 1.0
        tokens = b.embedding("embed_tokens", config.vocab_size, width, scale=scale)
        rows = config.max_position_embeddings
        return LearnedPositions(tokens, b.embedding("embed_positions", rows, width))

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.layer_norm("layer_norm", config.hidden_size, _EPS)

    def make_head(self, config: Any, b: Builder) -> Head:
        tied = self.embed.tokens if config.tie_word_embeddings else None
        return b.head("output_projection", config.hidden_size, config.vocab_size, tied=tied)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {**tiny_config("biogpt", "BioGptForCausalLM"), "num_key_value_heads": 4}
