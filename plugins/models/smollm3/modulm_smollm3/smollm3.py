"""SmolLM 3 (Hugging Face, 2025): Llama's block; every fourth layer has no positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm.nn import Builder
from modulm_layers import (
    Attention,
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["SmolLM3Config", "SmolLM3ForCausalLM", "SmolLM3Layer"]


@frozen(kw_only=True)
class SmolLM3Config(DecoderConfig):
    """config.json of SmolLM 3. Despite its name, `no_rope_layers` has a 1 for each layer with
    rotary positions (NoPE: Yang et al., arXiv 2501.18795).
    """

    max_position_embeddings: int = size(32768)
    rope_theta: float = 2000000.0
    tie_word_embeddings: bool = True
    use_sliding_window: bool = False
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: int = size(4)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        marks = self.no_rope_layers
        if marks is not None and len(marks) != self.num_hidden_layers:
            raise ValueError(
                f"no_rope_layers: {len(marks)} entries for {self.num_hidden_layers} layers"
            )

    def rotated(self, index: int) -> bool:
        """Whether layer `index` has rotary positions."""
        if self.no_rope_layers is not None:
            return bool(self.no_rope_layers[index])
        return (index + 1) % self.no_rope_layer_interval != 0

    def layer_type(self, index: int) -> str:
        if self.layer_types is not None:
            return self.layer_types[index]
        windowed = self.use_sliding_window and not self.rotated(index)
        return "sliding_attention" if windowed else "full_attention"

    def window(self, index: int) -> int | None:
        return super().window(index) if self.use_sliding_window else None


def _attention(c: SmolLM3Config, b: Builder, index: int) -> Attention:
    rope = c.rope(c.layer_type(index)) if c.rotated(index) else None
    return standard_attention(c, b, index, rope=rope)


class SmolLM3Layer(PreNormLayer):
    """The pre-norm block."""

    def __init__(self, c: SmolLM3Config, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            _attention(c, b, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


class SmolLM3ForCausalLM(DecoderForCausalLM):
    """SmolLM 3 with a language-model head."""

    api = 1
    config_type = SmolLM3Config
    layer = SmolLM3Layer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("smollm3", "SmolLM3ForCausalLM", no_rope_layer_interval=2)
