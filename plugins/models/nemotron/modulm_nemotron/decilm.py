"""Nemotron Super and Ultra (NVIDIA, arXiv 2505.00949): Llama, pruned by a search.

Layers differ in their key heads and widths, and some have no attention or no feed-forward part.
"""

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
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["DeciLMConfig", "DeciLMForCausalLM", "DeciLMLayer"]

_MULTIPLE = 256


@frozen(kw_only=True)
class DeciLMConfig(DecoderConfig):
    """config.json of Nemotron Super: `block_configs` has a table per layer.

    "attention": `n_heads_in_group` query heads share a key head; "ffn": `intermediate_size`, or
    `ffn_mult`, whose two thirds times the hidden size are rounded up to a multiple of 256. `no_op`
    leaves a part out.
    """

    intermediate_size: int | None = size(None)
    rms_norm_eps: float = 1e-5
    block_configs: tuple[dict[str, Any], ...] = ()

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if len(self.block_configs) != self.num_hidden_layers:
            raise ValueError(
                f"block_configs: {len(self.block_configs)} entries for "
                f"{self.num_hidden_layers} layers"
            )
        for index in range(self.num_hidden_layers):
            self.key_heads(index)
            self.width(index)

    def key_heads(self, index: int) -> int:
        """Number of key heads of layer `index`; 0 without attention."""
        part = self._part(index, "attention")
        if part.get("no_op"):
            return 0
        group = part.get("n_heads_in_group")
        if not isinstance(group, int) or group < 1 or self.num_attention_heads % group:
            raise ValueError(
                f"block_configs: layer {index}: attention.n_heads_in_group: {group!r} does not "
                f"divide {self.num_attention_heads} heads"
            )
        return self.num_attention_heads // group

    def width(self, index: int) -> int:
        """Width of the feed-forward part of layer `index`; 0 without one."""
        part = self._part(index, "ffn")
        if part.get("no_op"):
            return 0
        width, factor = part.get("intermediate_size"), part.get("ffn_mult")
        if width is None and isinstance(factor, int | float):
            width = -(-int(2 * factor * self.hidden_size / 3) // _MULTIPLE) * _MULTIPLE
        if not isinstance(width, int) or width < 1:
            raise ValueError(f"block_configs: layer {index}: ffn.intermediate_size: {width!r}")
        return width

    def _part(self, index: int, name: str) -> Mapping[str, Any]:
        part = self.block_configs[index].get(name)
        if not isinstance(part, dict):
            raise ValueError(f"block_configs: layer {index}: {name}: a table is needed")
        if part.get("replace_with_linear"):
            raise ValueError(
                f"block_configs: layer {index}: {name}.replace_with_linear: not supported yet"
            )
        return part


class DeciLMLayer(Module):
    """The pre-norm block, without the parts that the layer lacks."""

    def __init__(self, c: DeciLMConfig, b: Builder, index: int) -> None:
        super().__init__()
        heads, width = c.key_heads(index), c.width(index)
        self.attn = standard_attention(c, b, index, kv_heads=heads) if heads else None
        self.mlp = standard_mlp(c, b, inner=width) if width else None
        hidden, eps = c.hidden_size, c.rms_norm_eps
        self.attn_norm = b.rms_norm("input_layernorm", hidden, eps) if heads else None
        self.mlp_norm = b.rms_norm("post_attention_layernorm", hidden, eps) if width else None

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden]."""
        if self.attn is not None and self.attn_norm is not None:
            x, residual = self.attn_norm.add(x, residual)
            x = self.attn(x, batch)
        if self.mlp is not None and self.mlp_norm is not None:
            x, residual = self.mlp_norm.add(x, residual)
            x = self.mlp(x)
        return x, residual


class DeciLMForCausalLM(DecoderForCausalLM):
    """Nemotron Super with a language-model head."""

    api = 1
    config_type = DeciLMConfig
    layer = DeciLMLayer
    oracle = "modulm_nemotron.oracle:AsLlama"

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        none: dict[str, Any] = {"no_op": True}
        blocks = [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": none, "ffn": {"intermediate_size": 48}},
            {"attention": {"n_heads_in_group": 4}, "ffn": none},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"intermediate_size": 96}},
        ]
        config = tiny_config(
            "nemotron-nas", "DeciLMForCausalLM", num_hidden_layers=4, block_configs=blocks
        )
        return {**config, "intermediate_size": None, "num_key_value_heads": None}
