"""config.json of Gemma 4's text models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attrs import Factory, frozen

from modulm.nn import DecoderConfig, Rope, size

__all__ = ["Gemma4Config"]


@frozen(kw_only=True)
class Gemma4Config(DecoderConfig):
    """Full layers have heads of their own size and number, in either spelling of the keys:
    `global_head_dim` and `num_global_key_value_heads`, or `per_layer_config` with a table for each
    layer that differs. The last `num_kv_shared_layers` layers use the keys and values of the
    last layer of their kind before them."""

    head_dim: int | None = size(256)
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = size(131072)
    tie_word_embeddings: bool = True
    sliding_window: int | None = size(512)
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: str | None = None
    vocab_size_per_layer_input: int = size(262144)
    hidden_size_per_layer_input: int = size(256, least=0)
    attention_k_eq_v: bool = False
    global_head_dim: int = size(512)
    num_global_key_value_heads: int | None = size(None)
    per_layer_config: dict[str, dict[str, Any]] = Factory(dict)
    num_kv_shared_layers: int = size(0, least=0)
    use_double_wide_mlp: bool = False
    enable_moe_block: bool = False
    num_experts: int | None = size(None)
    top_k_experts: int | None = size(None)
    moe_intermediate_size: int | None = size(None)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.use_bidirectional_attention == "all":
            raise ValueError("use_bidirectional_attention: every token sees all: not yet")
        kinds = {self.layer_type(i) for i in range(self.num_hidden_layers)}
        own = {self.layer_type(i) for i in range(self.first_shared)}
        if own != kinds:
            raise ValueError(
                f"num_kv_shared_layers: the {self.num_kv_shared_layers} last layers need one "
                "before them of each kind"
            )
        if self.enable_moe_block and not 1 <= (self.top_k_experts or 0) <= (self.num_experts or 0):
            raise ValueError(f"top_k_experts: {self.top_k_experts} of {self.num_experts}")
        if self.enable_moe_block and self.moe_intermediate_size is None:
            raise ValueError("moe_intermediate_size: is required")

    @property
    def first_shared(self) -> int:
        """The first layer that uses another's keys and values."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    def layer_type(self, index: int) -> str:
        if self.layer_types is not None:
            return self.layer_types[index]
        full = (index + 1) % 6 == 0 or index == self.num_hidden_layers - 1
        return "full_attention" if full else "sliding_attention"

    def heads_of(self, index: int) -> tuple[int, int]:
        """Key heads of layer `index`, and the dimensions of one head."""
        own = self.per_layer_config.get(str(index), {})
        kv_heads, width = self.kv_heads, self.head_size
        if self.layer_type(index) == "full_attention" and not self.per_layer_config:
            width = self.global_head_dim
            if self.attention_k_eq_v:
                kv_heads = self.num_global_key_value_heads or kv_heads
        return own.get("num_key_value_heads", kv_heads), own.get("head_dim", width)

    def rotation(self, index: int) -> Rope:
        """Full layers turn the first part of a head only, at the speeds that it has in the whole.

        An infinite factor stands for a dimension that does not turn.
        """
        kind, (_, width) = self.layer_type(index), self.heads_of(index)
        table = dict((self.rope_parameters or _ROPES).get(kind, _ROPES[kind]))
        if table.get("rope_type", "default") == "default":
            return Rope(size=width, theta=float(table.get("rope_theta", 10000.0)))
        if table["rope_type"] != "proportional":
            raise ValueError(f"rope_parameters: rope_type {table['rope_type']!r}: not yet")
        turning = int(table.get("partial_rotary_factor", 1.0) * width // 2)
        slower = float(table.get("factor", 1.0))
        factors = (slower,) * turning + (math.inf,) * (width // 2 - turning)
        return Rope(
            size=width,
            theta=float(table.get("rope_theta", 1e6)),
            kind="longrope",
            short_factors=factors,
            long_factors=factors,
        )

    def rope(self, layer_type: str = "") -> Rope:
        return Rope(size=self.head_size)

    @property
    def max_length(self) -> int:
        return self.max_position_embeddings


_ROPES: Mapping[str, Mapping[str, Any]] = {
    "sliding_attention": {"rope_theta": 10000.0},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
}
