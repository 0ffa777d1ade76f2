"""Gemma 3 (arXiv 2503.19786): five window layers per full one, with different rotary bases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import Converter, field, frozen

from modulm.nn import Builder
from modulm_gemma.gemma import gemma_norm
from modulm_gemma.gemma2 import Gemma2Config, Gemma2ForCausalLM, Gemma2Layer
from modulm_layers import Attention, Rope, TextVectors, parse_rope, size, tiny_config

__all__ = [
    "Gemma3Config",
    "Gemma3ForCausalLM",
    "Gemma3Layer",
    "Gemma3TextModel",
    "Rnj1Config",
    "Rnj1ForCausalLM",
]


def _reads_forward(causal: bool, config: Any) -> bool:
    return causal and not config.use_bidirectional_attention


@frozen(kw_only=True)
class Gemma3Config(Gemma2Config):
    """config.json of Gemma 3 for text. Older files have `rope_local_base_freq` for window layers
    and `sliding_window_pattern` instead of layer types.

    With `use_bidirectional_attention` (EmbeddingGemma), tokens see those after them, too, and
    half of the window on either side.
    """

    BIDIRECTIONAL: ClassVar[bool] = True

    max_position_embeddings: int = size(131072)
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10_000.0
    sliding_window_pattern: int = size(6)
    is_causal: bool = field(default=True, converter=Converter(_reads_forward, takes_self=True))

    def window(self, index: int) -> int | None:
        width = super().window(index)
        return width // 2 if width and self.use_bidirectional_attention else width

    def layer_type(self, index: int) -> str:
        if self.layer_types is not None:
            return self.layer_types[index]
        full = (index + 1) % self.sliding_window_pattern == 0
        return "full_attention" if full else "sliding_attention"

    def rope(self, layer_type: str = "") -> Rope:
        if layer_type == "sliding_attention" and self.rope_parameters is None:
            local = {"rope_theta": self.rope_local_base_freq}
            return parse_rope(
                local, head_size=self.head_size, max_positions=self.max_position_embeddings
            )
        return super().rope(layer_type)


class Gemma3Layer(Gemma2Layer):
    """Gemma 2's block with normed queries and keys."""

    def make_attention(self, c: Gemma2Config, b: Builder, index: int, **changes: Any) -> Attention:
        at = b.at("self_attn")
        norms = tuple(gemma_norm(at, name, c, c.head_size) for name in ("q_norm", "k_norm"))
        return super().make_attention(c, b, index, qk_norm=norms, **changes)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 3 (text) with a language-model head."""

    api = 1
    config_type = Gemma3Config
    layer = Gemma3Layer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "gemma3_text",
            "Gemma3ForCausalLM",
            head_dim=24,
            sliding_window=12,
            query_pre_attn_scalar=20,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )


@frozen(kw_only=True)
class Rnj1Config(Gemma3Config):
    """config.json of Rnj 1, whose layers all have full attention."""

    layer_types: tuple[str, ...] | None = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        others = set(self.layer_types or ()) - {"full_attention"}
        if others:
            raise ValueError(f"layer_types: not supported yet: {sorted(others)}")

    def layer_type(self, index: int) -> str:
        return "full_attention"


class Rnj1ForCausalLM(Gemma3ForCausalLM):
    """Rnj 1 (Essential AI, 2025) with a language-model head."""

    config_type = Rnj1Config
    oracle = "modulm_gemma.oracle:AsGemma3"

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "rnj1",
            "Rnj1ForCausalLM",
            head_dim=24,
            query_pre_attn_scalar=20,
            hidden_activation="gelu_pytorch_tanh",
            final_logit_softcapping=5.0,
            tie_word_embeddings=False,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        )


class Gemma3TextModel(TextVectors, Gemma3ForCausalLM):
    """EmbeddingGemma (arXiv 2509.20354): vectors of texts, by default the mean over the tokens."""

    @property
    def pooling(self) -> str:
        return "MEAN"

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            **super().tiny(),
            "architectures": ["Gemma3TextModel"],
            "use_bidirectional_attention": True,
        }
