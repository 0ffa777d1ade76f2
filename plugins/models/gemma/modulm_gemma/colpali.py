"""ColPali (arXiv 2407.01449): PaliGemma with a vector per token of a page or a query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.model import Batch
from modulm.errors import UnsupportedError
from modulm.nn import Builder, WeightNames
from modulm_gemma.gemma import GemmaConfig, GemmaForCausalLM, gemma_norm
from modulm_gemma.paligemma import PaliGemmaConfig, PaliGemmaForConditionalGeneration
from modulm_layers import (
    AttentionNames,
    BidirectionalAttention,
    PreNormLayer,
    Segment,
    segments,
    standard_mlp,
)
from modulm_towers import TokenVectors, vlm_table

__all__ = ["ColPaliConfig", "ColPaliForRetrieval"]

#: Row lengths are padded to multiples of this.
_MULTIPLE = 16


class _Layer(PreNormLayer):
    """Gemma's block with bidirectional attention."""

    def __init__(self, c: GemmaConfig, b: Builder, index: int) -> None:
        attention = BidirectionalAttention(
            b.at("self_attn"),
            hidden=c.hidden_size,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_size,
            names=AttentionNames(),
            bias=c.attention_bias,
            rope=c.rope(c.layer_type(index)),
        )
        norms = (gemma_norm(b, f"{name}_layernorm", c) for name in ("input", "post_attention"))
        super().__init__(next(norms), attention, next(norms), standard_mlp(c, b, act=c.activation))

    def both_ways(
        self, x: Tensor, residual: Tensor | None, batch: Batch, rows: tuple[Segment, ...]
    ) -> tuple[Tensor, Tensor]:
        """See `forward`."""
        x, stream = self.attn_norm.add(x, residual)
        x, stream = self.mlp_norm.add(self.attn(x, batch, rows), stream)
        return self.mlp(x), stream


class _Reader(GemmaForCausalLM):
    """Gemma as an encoder: without a KV cache, so each prompt runs whole, in one step."""

    layer = _Layer

    def forward(self, batch: Batch) -> Tensor:
        rows = segments(batch, _MULTIPLE)
        x: Tensor = self.embed(batch)
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer.both_ways(x, residual, batch, rows)
        return self.norm.add(x, residual)[0]


@frozen(eq=False, kw_only=True)
class ColPaliConfig(PaliGemmaConfig):
    """config.json of ColPali; `vlm_config` is PaliGemma's. width: of the vectors."""

    width: int = 128

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        inner, width = vlm_table(table, "PaliGemmaForConditionalGeneration", file)
        config = super().from_table(inner, file)
        if config.text.driver is not GemmaForCausalLM:
            name = config.text.driver.__name__
            raise UnsupportedError(
                f"{file}: vlm_config.text_config: not supported yet in ColPali: {name}"
            )
        return evolve(config, width=width, text=evolve(config.text, driver=_Reader))


class ColPaliForRetrieval(TokenVectors, PaliGemmaForConditionalGeneration):
    """ColPali; all tokens of a prompt attend to each other, with or without an image."""

    config_type: ClassVar[type] = ColPaliConfig
    bidirectional = False

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        old = (r"^vlm\.(model\.)?language_model\.(model\.)?", "model.")
        ignore = (*names.ignore, r"^model\.lm_head\.")
        return evolve(names, rename=(old, *names.rename), ignore=ignore)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        inner = {key: value for key, value in super().tiny().items() if key != "architectures"}
        return {
            "architectures": ["ColPaliForRetrieval"],
            "model_type": "colpali",
            "embedding_dim": 24,
            "vlm_config": inner,
        }
