"""Nemotron 3 and 4, Minitron (arXiv 2402.16819, 2407.14679): squared ReLU, partial rotation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen
from torch import Tensor

from modulm.nn import Builder, Norm, Rewrite, WeightNames
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    PlainMLP,
    PreNormLayer,
    size,
    standard_attention,
    tiny_config,
)

__all__ = ["NemotronConfig", "NemotronForCausalLM", "NemotronLayer"]


@frozen(kw_only=True)
class NemotronConfig(DecoderConfig):
    """config.json of Nemotron."""

    hidden_act: str = "relu2"
    norm_eps: float = 1e-5
    max_position_embeddings: int = size(4096)
    partial_rotary_factor: float = 0.5


class NemotronLayer(PreNormLayer):
    """The pre-norm block with layer norms and a plain feed-forward part."""

    def __init__(self, c: NemotronConfig, b: Builder, index: int) -> None:
        inner, act = c.inner_size, c.hidden_act
        super().__init__(
            b.layer_norm("input_layernorm", c.hidden_size, c.norm_eps),
            standard_attention(c, b, index),
            b.layer_norm("post_attention_layernorm", c.hidden_size, c.norm_eps),
            PlainMLP(b.at("mlp"), c.hidden_size, inner, act, bias=c.mlp_bias),
        )


def _plus_one(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Add one to a norm weight that is stored minus one; in fp32, rounded once."""
    yield name, tensor.float() + 1.0


class NemotronForCausalLM(DecoderForCausalLM):
    """Nemotron with a language-model head."""

    api = 1
    config_type = NemotronConfig
    layer = NemotronLayer
    names = WeightNames(rewrite=(Rewrite(r"norm\.weight$", _plus_one),))

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.layer_norm("norm", config.hidden_size, config.norm_eps)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("nemotron", "NemotronForCausalLM", head_dim=24)
