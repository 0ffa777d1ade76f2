"""PLaMo 3 (Preferred Networks and NICT, 2025): norms around branches, windows in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch
from modulm.nn import Builder, Norm, WeightNames
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    Rope,
    parse_rope,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["Plamo3Config", "Plamo3ForCausalLM", "Plamo3Layer"]


@frozen(kw_only=True)
class Plamo3Config(DecoderConfig):
    """config.json of PLaMo 3. Without layer types, every `sliding_window_pattern`-th layer sees the
    whole text. Layers with a window have the rotary base `rope_local_theta`.
    """

    head_dim: int | None = size(128)
    max_position_embeddings: int = size(10 * 1024 * 1024)
    tie_word_embeddings: bool = True
    sliding_window: int | None = size(2048)
    sliding_window_pattern: int = size(8)
    interleaved_sliding_window: tuple[int | None, ...] | None = None
    rope_theta: float = 1_000_000.0
    rope_local_theta: float = 10_000.0

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        windows = self.interleaved_sliding_window
        if windows is not None and list(windows) != [
            self.window(i) for i in range(self.num_hidden_layers)
        ]:
            raise ValueError(
                "interleaved_sliding_window: not supported yet: windows that differ from "
                "sliding_window and its pattern"
            )

    def layer_type(self, index: int) -> str:
        if self.layer_types is not None:
            return self.layer_types[index]
        full = (index + 1) % self.sliding_window_pattern == 0
        return "full_attention" if full else "sliding_attention"

    def rope(self, layer_type: str = "") -> Rope:
        nested = self.rope_parameters is not None and layer_type in self.rope_parameters
        if layer_type != "sliding_attention" or nested:
            return super().rope(layer_type)
        return parse_rope(
            {"rope_theta": self.rope_local_theta},
            head_size=self.head_size,
            max_positions=self.max_position_embeddings,
        )


class Plamo3Layer(Module):
    """norm, attention, norm, add; norm, feed-forward, norm, add.

    The stored weights of norms exclude offsets: 1 before branches, 1/5 and 5**-1.5 after them.
    """

    def __init__(self, c: Plamo3Config, b: Builder, index: int) -> None:
        super().__init__()
        at = b.at("mixer")

        def norm(name: str, offset: float, at: Builder = b, width: int = c.hidden_size) -> Norm:
            return at.rms_norm(name, width, c.rms_norm_eps, offset=offset)

        norms = tuple(norm(name, 1.0, at, c.head_size) for name in ("q_norm", "k_norm"))
        self.attn_norm = norm("pre_mixer_norm", 1.0)
        self.attn = standard_attention(c, b, index, at="mixer", qk_norm=norms)
        self.attn_post = norm("post_mixer_norm", 1 / 5)
        self.mlp_norm = norm("pre_mlp_norm", 1.0)
        self.mlp = standard_mlp(c, b)
        self.mlp_post = norm("post_mlp_norm", 5**-1.5)

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden]."""
        x, residual = self.attn_norm.add(x, residual)
        x = self.attn_post(self.attn(x, batch))
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp_post(self.mlp(x)), residual


class Plamo3ForCausalLM(DecoderForCausalLM):
    """PLaMo 3 with a language-model head."""

    api = 1
    config_type = Plamo3Config
    layer = Plamo3Layer
    names = WeightNames(rename=((r"^model\.layers\.layers\.", "model.layers."),))
    oracle = "modulm_plamo.oracle:AsGemma3"

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.rms_norm("norm", config.hidden_size, config.rms_norm_eps, offset=1.0)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "plamo3",
            "Plamo3ForCausalLM",
            head_dim=24,
            sliding_window=12,
            sliding_window_pattern=2,
            tie_word_embeddings=False,
        )
