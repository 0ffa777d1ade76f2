"""Domyn Edge (Domyn, 2026): norms around both branches, layers that differ in their attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from modulm.nn import Builder
from modulm.nn.norm import RMSNorm
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLP,
    Rope,
    SandwichLayer,
    parse_rope,
    standard_attention,
    tiny_config,
)

__all__ = ["DomynEdgeConfig", "DomynEdgeForCausalLM", "DomynEdgeLayer"]


@frozen(kw_only=True)
class DomynEdgeConfig(DecoderConfig):
    """config.json of Domyn Edge.

    per_layer_config: the `head_dim` of layers whose own differs, by index. For each layer:
    position_layers, "rope" or "nope"; window_sizes, how many tokens before its own a token sees (0
    or less for all).
    """

    position_layers: tuple[str, ...] = ()
    per_layer_config: dict[str, Any] = field(factory=dict)
    window_sizes: tuple[Any, ...] = field(default=())

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        count = self.num_hidden_layers
        for key in ("position_layers", "window_sizes"):
            if len(getattr(self, key)) != count:
                raise ValueError(f"{key}: {len(getattr(self, key))} entries for {count} layers")
        if set(self.position_layers) - {"rope", "nope"}:
            raise ValueError(f"position_layers: rope and nope, got {set(self.position_layers)}")
        for index in range(count):
            self.head_dim_of(index), self.window(index)

    def head_dim_of(self, index: int) -> int:
        """Size of layer `index`'s heads."""
        own = self.per_layer_config.get(str(index), {})
        if not isinstance(own, dict) or set(own) - {"head_dim"}:
            raise ValueError(f"per_layer_config: {index}: not supported yet: {own!r}")
        value = own.get("head_dim", self.head_size)
        if type(value) is not int or value < 1:
            raise ValueError(f"per_layer_config: head_dim: {value!r} is not a number from 1")
        return value

    def window(self, index: int) -> int | None:
        entry = self.window_sizes[index]
        before = entry[0] if isinstance(entry, list | tuple) and entry else entry
        if type(before) is not int:
            raise ValueError(f"window_sizes: {entry!r} is no number of tokens")
        return before + 1 if before > 0 else None

    def rope_of(self, index: int) -> Rope | None:
        """Rotary positions of layer `index`, None if it has none."""
        if self.position_layers[index] == "nope":
            return None
        table = self.rope_parameters or {"rope_theta": self.rope_theta}
        size, length = self.head_dim_of(index), self.max_position_embeddings
        return parse_rope(table, head_size=size, max_positions=length)


class DomynEdgeLayer(SandwichLayer):
    """norm, attention, norm, add; norm, feed-forward, norm, add; queries' norms without weights."""

    def __init__(self, c: DomynEdgeConfig, b: Builder, index: int) -> None:
        hidden, eps, size = c.hidden_size, c.rms_norm_eps, c.head_dim_of(index)
        k_norm = b.at("attention").rms_norm("k_norm", size, eps)
        attention = standard_attention(
            c,
            b,
            index,
            at="attention",
            head_dim=size,
            rope=c.rope_of(index),
            qk_norm=(RMSNorm(b.ops, eps), k_norm),
        )
        super().__init__(
            b.rms_norm("pre_attention_norm", hidden, eps),
            attention,
            b.rms_norm("post_attention_norm", hidden, eps),
            b.rms_norm("pre_feedforward_norm", hidden, eps),
            GatedMLP(b.at("feedforward"), hidden, c.inner_size, c.hidden_act),
            b.rms_norm("post_feedforward_norm", hidden, eps),
        )


class DomynEdgeForCausalLM(DecoderForCausalLM):
    """Domyn Edge with a language-model head."""

    api = 1
    config_type = DomynEdgeConfig
    layer = DomynEdgeLayer
    oracle = "modulm_domyn.oracle:AsQwen3"

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "domyn_edge",
            "DomynEdgeForCausalLM",
            head_dim=24,
            position_layers=["rope", "nope", "rope"],
            per_layer_config={"1": {"head_dim": 16}},
            window_sizes=[[11, 0], [0, 0], [-1, 0]],
        )
