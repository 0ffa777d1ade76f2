"""XGLM (Lin et al., arXiv 2112.10668): sinusoidal positions, scaled embeddings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch
from modulm.nn import Builder, Head, Norm, WeightNames
from modulm_layers import (
    AttentionNames,
    DecoderConfig,
    DecoderForCausalLM,
    PlainMLP,
    PreNormLayer,
    size,
    standard_attention,
)

__all__ = ["XGLMConfig", "XGLMForCausalLM", "XGLMLayer", "sinusoids"]

_EPS = 1e-5
_OFFSET = 2


@frozen(kw_only=True)
class XGLMConfig(DecoderConfig):
    """config.json of XGLM, with its own key names."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "d_model": "hidden_size",
        "num_layers": "num_hidden_layers",
        "attention_heads": "num_attention_heads",
        "ffn_dim": "intermediate_size",
        "activation_function": "hidden_act",
    }

    hidden_act: str = "gelu"
    max_position_embeddings: int = size(2048)
    scale_embedding: bool = True
    tie_word_embeddings: bool = True
    add_cross_attention: bool = False

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.add_cross_attention:
            raise ValueError("add_cross_attention: not supported yet: true")
        if self.hidden_size % 2 or self.hidden_size < 4:
            raise ValueError(f"d_model: {self.hidden_size} is odd or less than 4")


class XGLMLayer(PreNormLayer):
    """The pre-norm block; every projection has a bias."""

    def __init__(self, c: XGLMConfig, b: Builder, index: int) -> None:
        names = AttentionNames(out="out_proj")
        inner, act = c.inner_size, c.hidden_act
        super().__init__(
            b.layer_norm("self_attn_layer_norm", c.hidden_size, _EPS),
            standard_attention(c, b, index, rope=None, bias=True, out_bias=True, names=names),
            b.layer_norm("final_layer_norm", c.hidden_size, _EPS),
            PlainMLP(b, c.hidden_size, inner, act, up="fc1", down="fc2"),
        )


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Sines, then cosines, of waves from 1 to 10000 / 2 pi tokens: [tokens, width] fp32.

    As in tensor2tensor: the longest wave is reached exactly, unlike in Vaswani et al.
    (arXiv 1706.03762, section 3.5).
    """
    half = width // 2
    steps = torch.arange(half, dtype=torch.float32, device=positions.device)
    angles = positions[:, None].float() * torch.exp(steps * (-math.log(10000) / (half - 1)))
    return torch.cat([angles.sin(), angles.cos()], -1)


class XGLMEmbedding(Module):
    """Token embeddings plus positions; the first token is at position 2."""

    position_table: Tensor

    def __init__(self, c: XGLMConfig, b: Builder) -> None:
        super().__init__()
        scale = math.sqrt(c.hidden_size) if c.scale_embedding else 1.0
        self.ops = b.ops
        self.tokens = b.embedding("embed_tokens", c.vocab_size, c.hidden_size, scale=scale)
        self.register_buffer("position_table", None, persistent=False)
        b.after(self.tokens, partial(self._place, c, b.shared.dtype, b.shared.device))

    def _place(self, c: XGLMConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Build the position table up to the model's maximum length."""
        positions = torch.arange(c.max_position_embeddings, device=device) + _OFFSET
        self.position_table = sinusoids(positions, c.hidden_size).to(dtype)

    def forward(self, batch: Batch) -> Tensor:
        """[tokens, hidden] for the batch's tokens."""
        x: Tensor = self.tokens(batch)
        both: Tensor = self.ops.add(x, self.ops.embedding(batch.positions, self.position_table))
        return both


class XGLMForCausalLM(DecoderForCausalLM):
    """XGLM with a language-model head; old files also contain the position table."""

    api = 1
    config_type = XGLMConfig
    layer = XGLMLayer
    names = WeightNames(ignore=(r"embed_positions\.weights$",))

    def make_embedding(self, config: Any, b: Builder) -> XGLMEmbedding:
        return XGLMEmbedding(config, b)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.layer_norm("layer_norm", config.hidden_size, _EPS)

    def make_head(self, config: Any, b: Builder) -> Head:
        tied = self.embed.tokens if config.tie_word_embeddings else None
        return b.head("lm_head", config.hidden_size, config.vocab_size, tied=tied)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["XGLMForCausalLM"],
            "model_type": "xglm",
            "vocab_size": 512,
            "d_model": 64,
            "num_layers": 3,
            "attention_heads": 4,
            "ffn_dim": 96,
            "max_position_embeddings": 256,
        }
