"""config.json of the text models of Gemma 3n and Gemma 4."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import Factory, frozen

from modulm_layers import DecoderConfig, Rope, size

__all__ = ["Gemma3nConfig", "Gemma4Config", "SharingConfig"]


@frozen(kw_only=True)
class SharingConfig(DecoderConfig):
    """Keys of Gemma 3n and 4. The last `num_kv_shared_layers` layers share the keys and values of
    the last layer of their kind before them.
    """

    PERIOD: ClassVar[int]

    head_dim: int | None = size(256)
    hidden_activation: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    sliding_window: int | None = size(512)
    vocab_size_per_layer_input: int = size(262144)
    hidden_size_per_layer_input: int = size(256, least=0)
    num_kv_shared_layers: int = size(0, least=0)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        kinds = {self.layer_type(i) for i in range(self.num_hidden_layers)}
        unshared_kinds = {self.layer_type(i) for i in range(self.first_shared)}
        if unshared_kinds != kinds:
            raise ValueError(
                f"num_kv_shared_layers: the {self.num_kv_shared_layers} last layers need one "
                "before them of each kind"
            )

    @property
    def first_shared(self) -> int:
        """The first layer that shares another's keys and values."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    def layer_type(self, index: int) -> str:
        if self.layer_types is not None:
            return self.layer_types[index]
        return "sliding_attention" if (index + 1) % self.PERIOD else "full_attention"

    def heads_of(self, index: int) -> tuple[int, int]:
        """Key heads of layer `index`, and the dimensions of one head."""
        return self.kv_heads, self.head_size

    def rotation(self, index: int) -> Rope:
        """The rotary positions of layer `index`."""
        return self.rope(self.layer_type(index))


@frozen(kw_only=True)
class Gemma3nConfig(SharingConfig):
    """config.json of Gemma 3n. `intermediate_size` may be a list with a value per layer.

    `activation_sparsity_pattern` is the fraction of each layer's gates that is zeroed. Older files
    have `rope_local_base_freq` for window layers.
    """

    PERIOD = 5

    intermediate_size: Any = 16384
    max_position_embeddings: int = size(32768)
    num_kv_shared_layers: int = size(15, least=0)
    final_logit_softcapping: float | None = 30.0
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10_000.0
    altup_num_inputs: int = size(4)
    altup_active_idx: int = size(0, least=0)
    altup_correct_scale: bool = True
    laurel_rank: int = size(64)
    activation_sparsity_pattern: Any = None

    def __attrs_post_init__(self) -> None:
        for key, least in (("intermediate_size", 1), ("activation_sparsity_pattern", 0)):
            values = self.per_layer(key)
            if len(values) != self.num_hidden_layers or not all(
                type(n) in (int, float) and n >= least for n in values
            ):
                raise ValueError(f"{key}: {values!r} is not a number for each layer")
        if self.altup_active_idx >= self.altup_num_inputs:
            raise ValueError(
                f"altup_active_idx: {self.altup_active_idx} of {self.altup_num_inputs}"
            )
        super().__attrs_post_init__()

    def per_layer(self, key: str) -> list[Any]:
        """The values by layer of a key that holds a list, one number, or nothing."""
        layers = self.num_hidden_layers
        value = {
            "intermediate_size": self.intermediate_size,
            "activation_sparsity_pattern": self.activation_sparsity_pattern,
        }[key]
        if value is None:
            sparse = 10 if layers > 10 else 0
            return [0.95] * sparse + [0.0] * (layers - sparse)
        return list(value) if isinstance(value, list | tuple) else [value] * layers

    @property
    def inner_size(self) -> int:
        return int(max(self.per_layer("intermediate_size")))

    def rope(self, layer_type: str = "") -> Rope:
        if layer_type == "sliding_attention" and self.rope_parameters is None:
            return Rope(size=self.head_size, theta=self.rope_local_base_freq)
        return super().rope(layer_type)


@frozen(kw_only=True)
class Gemma4Config(SharingConfig):
    """config.json of Gemma 4.

    Global layers may differ in number and size of heads: `global_head_dim` and
    `num_global_key_value_heads`, or `per_layer_config` with a table per layer.
    """

    PERIOD = 6

    max_position_embeddings: int = size(131072)
    final_logit_softcapping: float | None = None
    pad_token_id: int | None = 0
    use_bidirectional_attention: str | None = None
    attention_k_eq_v: bool = False
    global_head_dim: int = size(512)
    num_global_key_value_heads: int | None = size(None)
    per_layer_config: dict[str, dict[str, Any]] = Factory(dict)
    use_double_wide_mlp: bool = False
    enable_moe_block: bool = False
    num_experts: int | None = size(None)
    top_k_experts: int | None = size(None)
    moe_intermediate_size: int | None = size(None)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.use_bidirectional_attention == "all":
            raise ValueError("use_bidirectional_attention: not supported yet for all tokens")
        if self.enable_moe_block and not 1 <= (self.top_k_experts or 0) <= (self.num_experts or 0):
            raise ValueError(f"top_k_experts: {self.top_k_experts} of {self.num_experts}")
        if self.enable_moe_block and self.moe_intermediate_size is None:
            raise ValueError("moe_intermediate_size: is required")

    def layer_type(self, index: int) -> str:
        last = self.layer_types is None and index == self.num_hidden_layers - 1
        return "full_attention" if last else super().layer_type(index)

    def heads_of(self, index: int) -> tuple[int, int]:
        settings = self.per_layer_config.get(str(index), {})
        kv_heads, width = self.kv_heads, self.head_size
        if self.layer_type(index) == "full_attention" and not self.per_layer_config:
            width = self.global_head_dim
            if self.attention_k_eq_v:
                kv_heads = self.num_global_key_value_heads or kv_heads
        return settings.get("num_key_value_heads", kv_heads), settings.get("head_dim", width)

    def rotation(self, index: int) -> Rope:
        """Global layers rotate only the first part of a head, at the frequencies of the whole head.

        An infinite factor marks a dimension that is not rotated.
        """
        kind, (_, width) = self.layer_type(index), self.heads_of(index)
        table = dict((self.rope_parameters or _ROPES).get(kind, _ROPES[kind]))
        if table.get("rope_type", "default") == "default":
            return Rope(size=width, theta=float(table.get("rope_theta", 10000.0)))
        if table["rope_type"] != "proportional":
            raise ValueError(
                f"rope_parameters: rope_type: not supported yet: {table['rope_type']!r}"
            )
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
