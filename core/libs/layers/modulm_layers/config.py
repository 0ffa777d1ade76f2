"""Decoder settings of config.json as a frozen, validated value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
from attrs import field, frozen

from modulm_layers.rope import Rope, parse_rope

__all__ = ["DecoderConfig", "only", "size"]

#: Larger than any existing model; a config that implies more is taken for a mistake.
_MOST_PARAMETERS = 10**13
_MOST_POSITIONS = 2**27
_MOST_LAYERS = 4096


def only(settings: Any, **allowed: tuple[Any, ...]) -> None:
    """Reject values that are not implemented. Raises ValueError that names the key."""
    for key, values in allowed.items():
        value = getattr(settings, key)
        if value not in values:
            known = ", ".join(map(repr, values))
            raise ValueError(f"{key}: not supported yet: {value!r}; supported: {known}")


def size(default: Any = attrs.NOTHING, least: int = 1) -> Any:
    """A field for a count: an integer of at least `least`, or None where the default is None."""

    def check(_: object, attribute: attrs.Attribute[Any], value: int | None) -> None:
        if value is not None and value < least:
            raise ValueError(f"{attribute.name}: {value} is less than {least}")

    return field(default=default, validator=check)


@frozen(kw_only=True)
class DecoderConfig:
    """Keys of config.json that decoders have in common; families add their own.

    A key without a default is required. Keys that the class does not declare are ignored, because
    such files also hold settings for training and other programs. `ALIASES` maps a family's
    spelling of a key to the common one.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {}
    ROPE_NEOX: ClassVar[bool] = True
    #: Whether the family's layers can see the whole text (`is_causal: false`), for vectors.
    BIDIRECTIONAL: ClassVar[bool] = False

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int | None = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    num_key_value_heads: int | None = size(None)
    head_dim: int | None = size(None)
    max_position_embeddings: int = size(2048)
    original_max_position_embeddings: int | None = size(None)
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    is_causal: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = size(None, least=0)
    layer_types: tuple[str, ...] | None = None
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float = 1.0

    def __attrs_post_init__(self) -> None:
        only(self, is_causal=(True, False) if self.BIDIRECTIONAL else (True,))
        if self.num_attention_heads % self.kv_heads:
            raise ValueError(
                f"num_key_value_heads: {self.num_attention_heads} query heads cannot be "
                f"divided evenly over {self.kv_heads}"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads: hidden_size {self.hidden_size} is no multiple of "
                f"{self.num_attention_heads}"
            )
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types: {len(self.layer_types)} entries for {self.num_hidden_layers} layers"
            )
        self._bound()
        for kind in set(self.layer_types or ("",)):
            self.rope(kind)

    def _bound(self) -> None:
        """Reject sizes that no machine could hold, before anything is allocated."""
        if self.num_hidden_layers > _MOST_LAYERS:
            raise ValueError(f"num_hidden_layers: {self.num_hidden_layers} is implausible")
        if self.max_position_embeddings > _MOST_POSITIONS:
            raise ValueError(
                f"max_position_embeddings: {self.max_position_embeddings} is implausible"
            )
        sizes = {
            "vocab_size": self.vocab_size * self.hidden_size,
            "num_attention_heads": self.heads * self.head_size * self.hidden_size,
            "intermediate_size": self.inner_size * self.hidden_size,
        }
        for key, parameters in sizes.items():
            if parameters * self.num_hidden_layers > _MOST_PARAMETERS:
                raise ValueError(
                    f"{key}: with hidden_size {self.hidden_size} and {self.num_hidden_layers} "
                    f"layers this is {parameters * self.num_hidden_layers:.1e} parameters"
                )

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads; defaults to the number of query heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Dimensions per head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def inner_size(self) -> int:
        """Width of the feed-forward block; defaults to 4 times the hidden size."""
        return self.intermediate_size or 4 * self.hidden_size

    def layer_type(self, index: int) -> str:
        """Return the entry of `layer_types` for layer `index`, "" if the file has none."""
        return self.layer_types[index] if self.layer_types is not None else ""

    def window(self, index: int) -> int | None:
        """Return the attention window of layer `index` in tokens, by its layer type, or None."""
        kind = self.layer_type(index)
        return (self.sliding_window or None) if kind in ("", "sliding_attention") else None

    def rope(self, layer_type: str = "") -> Rope:
        """Return the rotary positions for layers of one type, from either spelling of the keys."""
        table = dict(self.rope_scaling or self.rope_parameters or {})
        if isinstance(table.get(layer_type), dict):
            table = dict(table[layer_type])
        table.setdefault("rope_theta", self.rope_theta)
        table.setdefault("partial_rotary_factor", self.partial_rotary_factor)
        if self.original_max_position_embeddings is not None:
            table["original_max_position_embeddings"] = self.original_max_position_embeddings
        return parse_rope(
            table,
            head_size=self.head_size,
            max_positions=self.max_position_embeddings,
            neox=self.ROPE_NEOX,
        )

    @property
    def max_length(self) -> int:
        """Maximum sequence length in tokens."""
        rope = self.rope(self.layer_types[0] if self.layer_types else "")
        if rope.kind in ("linear", "dynamic"):
            return int(self.max_position_embeddings * rope.factor)
        if rope.kind == "yarn":
            return max(self.max_position_embeddings, int(rope.original * rope.factor))
        return self.max_position_embeddings
