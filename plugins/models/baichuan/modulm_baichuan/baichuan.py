"""Baichuan 1 and 2 (arXiv 2309.10305): Llama's block; 7B has rotary positions, 13B ALiBi.

The LM head of Baichuan 2 has normalized rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from modulm.nn import Builder, Rewrite, WeightNames
from modulm_layers import (
    AttentionNames,
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["BaiChuanForCausalLM", "BaichuanConfig", "BaichuanForCausalLM", "BaichuanLayer"]

#: Values that distinguish 7B from 13B and Baichuan 2 from 1, as files have no key for it.
_HIDDEN_7B, _VOCABULARY_2 = 4096, 125696


@frozen(kw_only=True)
class BaichuanConfig(DecoderConfig):
    """config.json of Baichuan.

    `norm_head` is for checkpoints of Baichuan 2 with another vocabulary (`--hf-overrides`).
    """

    ALIASES: ClassVar[Mapping[str, str]] = {"model_max_length": "max_position_embeddings"}

    max_position_embeddings: int = size(4096)
    norm_head: bool | None = None
    architectures: tuple[str, ...] = ()

    @property
    def rotates(self) -> bool:
        """Whether positions are rotary; 13B has ALiBi."""
        return self.hidden_size == _HIDDEN_7B or "BaiChuanForCausalLM" in self.architectures

    @property
    def normed_head(self) -> bool:
        """Whether the rows of the LM head are normalized."""
        known = self.norm_head
        return self.vocab_size == _VOCABULARY_2 if known is None else known


class BaichuanLayer(PreNormLayer):
    """The pre-norm block; queries, keys and values are stored as one tensor."""

    def __init__(self, c: BaichuanConfig, b: Builder, index: int) -> None:
        positions = {} if c.rotates else {"rope": None, "alibi": 1.0}
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index, names=AttentionNames(qkv="W_pack"), **positions),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


def _unit(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield name, F.normalize(tensor.float(), dim=-1)


class BaichuanForCausalLM(DecoderForCausalLM):
    """Baichuan with a language-model head."""

    api = 1
    config_type = BaichuanConfig
    layer = BaichuanLayer
    oracle = "modulm_baichuan.oracle:AsLlama"

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        if not config.normed_head:
            return WeightNames()
        return WeightNames(rewrite=(Rewrite(r"^lm_head\.weight$", _unit),))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("baichuan", "BaichuanForCausalLM", num_key_value_heads=4, norm_head=True)


class BaiChuanForCausalLM(BaichuanForCausalLM):
    """Baichuan 7B, under the name in its first files."""

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("baichuan", "BaiChuanForCausalLM", num_key_value_heads=4)
