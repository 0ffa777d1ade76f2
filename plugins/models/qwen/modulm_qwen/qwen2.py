"""Qwen 2 and 2.5 (arXiv 2407.10671, 2412.15115): biases on queries, keys and values only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.nn import Builder
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["Qwen2Config", "Qwen2ForCausalLM", "Qwen2Layer", "QwenConfig"]


@frozen(kw_only=True)
class QwenConfig(DecoderConfig):
    """Common keys of Qwen's files.

    The window applies only with `use_sliding_window`, and without layer types only from layer
    `max_window_layers` on.
    """

    use_sliding_window: bool = False
    max_window_layers: int = size(28, least=0)
    max_position_embeddings: int = size(32768)

    def window(self, index: int) -> int | None:
        if not self.use_sliding_window:
            return None
        if self.layer_types is None and index < self.max_window_layers:
            return None
        return super().window(index)


@frozen(kw_only=True)
class Qwen2Config(QwenConfig):
    """config.json of Qwen 2 and 2.5."""

    BIDIRECTIONAL: ClassVar[bool] = True


class Qwen2Layer(PreNormLayer):
    """The pre-norm block with biased projections into attention."""

    def __init__(self, c: Qwen2Config, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index, bias=True, out_bias=False),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Qwen 2 and 2.5 with a language-model head."""

    api = 1
    config_type = Qwen2Config
    layer = Qwen2Layer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "qwen2",
            "Qwen2ForCausalLM",
            use_sliding_window=True,
            sliding_window=12,
            max_window_layers=1,
        )
