"""Moondream 3's text model: parallel branches, attention scaled by token and position, experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.errors import UnsupportedError
from modulm.nn import Builder, Embedding, Head, Norm
from modulm_layers import (
    Attention,
    AttentionNames,
    DecoderConfig,
    DecoderForCausalLM,
    ExpertNames,
    MoE,
    ParallelLayer,
    PlainMLP,
    Routing,
    only,
    size,
)

__all__ = ["MoondreamText", "MoondreamTextConfig", "split_fused"]

_EPS = 1e-5
#: Dimensions of a head that are rotated.
_ROTATED = 32
_ATTENTION = AttentionNames("q", "k", "v", "proj", "qkv")
_EXPERTS = ExpertNames(router="router", gate_up_bias="experts.gate_up_proj_bias")


@frozen(kw_only=True)
class MoondreamTextConfig(DecoderConfig):
    """`text` of config.json. moe: None for a model without experts, or a table.

    Missing keys have the values of the published model.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "dim": "hidden_size",
        "ff_dim": "intermediate_size",
        "max_context": "max_position_embeddings",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "n_layers": "num_hidden_layers",
    }

    vocab_size: int = size(51200)
    hidden_size: int = size(2048)
    intermediate_size: int | None = size(8192)
    num_hidden_layers: int = size(24)
    num_attention_heads: int = size(32)
    num_key_value_heads: int | None = size(32)
    max_position_embeddings: int = size(4096)
    hidden_act: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = False
    prefix_attn: int = size(730)
    n_experts: int = size(64)
    n_experts_per_tok: int = size(8)
    expert_inner_dim: int = size(1024)
    start_layer: int = size(4, least=0)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(self, tie_word_embeddings=(False,))
        if self.n_experts_per_tok > self.n_experts:
            raise ValueError(f"n_experts_per_tok: {self.n_experts_per_tok} of {self.n_experts}")


class _TauAttention(Attention):
    """Attention whose queries and values are scaled by token and position, per head."""

    alpha: Tensor
    query_map: Tensor
    value_map: Tensor

    def __init__(self, c: MoondreamTextConfig, b: Builder, index: int) -> None:
        if b.shared.mesh.tensor.size > 1:
            raise UnsupportedError(
                "tensor_parallel_size: not supported yet: scales of a head read all heads"
            )
        super().__init__(
            b, hidden=c.hidden_size, heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_size,
            rope=c.rope(c.layer_type(index)), bias=True, out_bias=True, names=_ATTENTION,
        )  # fmt: skip
        self.fusable = False
        width = (c.heads + 2 * c.kv_heads) * c.head_size
        at = b.at("tau")
        at.parameter("alpha", self, "alpha", (c.heads,))
        at.parameter("wq", self, "query_map", (c.heads, width))
        at.parameter("wv", self, "value_map", (c.heads, width))

    def _project(
        self, qkv: Tensor, positions: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [tokens, heads, head_dim], scaled and rotated."""
        features = F.gelu(qkv)
        steps = (positions.to(qkv.dtype) + 1).log()
        place = 0.5 + torch.sigmoid(self.alpha * steps[:, None])
        scale_q, scale_v = (
            torch.tanh(features @ tau.T) + place for tau in (self.query_map, self.value_map)
        )
        q, k, v = super()._project(qkv, positions, table)
        return q * scale_q[..., None], k, v * scale_v[:, : self.kv_heads, None]


class _Layer(ParallelLayer):
    """One norm before attention and the feed-forward block or experts."""

    def __init__(self, c: MoondreamTextConfig, b: Builder, index: int) -> None:
        hidden, at = c.hidden_size, b.at("mlp")
        mlp: Module = (
            MoE(
                at, hidden=hidden, inner=c.expert_inner_dim, experts=c.n_experts,
                routing=Routing(c.n_experts_per_tok, renormalise=True), act="gelu",
                router_bias=True, names=_EXPERTS,
            )
            if index >= c.start_layer
            else PlainMLP(at, hidden, c.inner_size, c.hidden_act, up="fc1", down="fc2")
        )  # fmt: skip
        norm = b.layer_norm("ln", hidden, _EPS)
        super().__init__(norm, _TauAttention(c, b.at("attn"), index), mlp)


class MoondreamText(DecoderForCausalLM):
    """The text model; it is not registered."""

    api = 1
    config_type = MoondreamTextConfig
    layer = _Layer
    root = "text"
    #: torch's products, of features with the scales of heads, round by rows.
    batch_invariant = False

    def make_embedding(self, config: Any, b: Builder) -> Embedding:
        return b.embedding("wte", config.vocab_size, config.hidden_size)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.layer_norm("post_ln", config.hidden_size, _EPS)

    def make_head(self, config: Any, b: Builder) -> Head:
        return b.head("text.lm_head", config.hidden_size, config.vocab_size, bias=True)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        """The `text` of a tiny Moondream's config.json."""
        return {
            "dim": 64,
            "ff_dim": 96,
            "n_layers": 3,
            "n_heads": 4,
            "n_kv_heads": 4,
            "vocab_size": 512,
            "max_context": 2048,
            "moe": {
                "n_experts": 4,
                "n_experts_per_tok": 2,
                "expert_inner_dim": 32,
                "start_layer": 1,
            },
        }


def split_fused(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Name the stacks of experts. The gate of an expert is gelu(x) times its other half plus one:
    a bias.
    """
    if tensor.dim() != 3:
        yield name, tensor
        return
    at, _, _ = name.rpartition(".mlp.fc")
    if name.endswith("fc2.weight"):
        yield f"{at}.mlp.experts.down_proj", tensor
        return
    bias = torch.zeros(tensor.shape[:2], dtype=tensor.dtype, device=tensor.device)
    bias[:, tensor.shape[1] // 2 :] = 1
    yield f"{at}.mlp.experts.gate_up_proj", tensor
    yield f"{at}.mlp.experts.gate_up_proj_bias", bias


def rotated(head: int) -> float:
    """The part of a head's dimensions that are rotated."""
    return min(_ROTATED / head, 1.0)
