"""Decoders made into encoders: layers that see the whole text, and models without a LM head.

Their config.json says `is_causal: false`, or their architecture implies it (LLM2Vec, arXiv
2404.05961; NV-Embed, arXiv 2405.17428). Nothing is cached, so each prompt runs whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import evolve
from torch import Tensor
from torch.nn import Identity, Module

from modulm.contracts.weight_names import WeightNames
from modulm.errors import UnsupportedError
from modulm_layers.attention import Attention, AttentionNames
from modulm_layers.encoder import attend_rows, step_segments
from modulm_layers.mla import LatentAttention

if TYPE_CHECKING:
    from modulm.contracts.attention import AttentionSpec
    from modulm.contracts.model import Batch
    from modulm.nn.builder import Builder

__all__ = ["TextClasses", "TextVectors", "WholeRowAttention", "WholeRowLatentAttention"]

#: Names of `pooling` in config.json and ours.
_POOLING: Mapping[str, str] = {"avg": "MEAN", "mean": "MEAN", "cls": "CLS", "last": "LAST"}


class WholeRowAttention(Attention):
    """Attention whose tokens see their whole row, or `window` tokens on either side.

    Raises UnsupportedError for what only causal layers have: softcaps, sinks and biases.
    """

    def make_cache(
        self, b: Builder, spec: AttentionSpec, kv_heads: int, names: AttentionNames
    ) -> None:
        if spec.softcap or spec.sinks or spec.alibi or spec.biases:
            raise UnsupportedError(
                f"is_causal: {b.prefix}: not supported yet: attention in both directions with "
                "softcaps, sinks, ALiBi or relative positions"
            )
        self.scale, self.window = spec.scale, spec.window if b.shared.windows else None

    def attend(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [tokens, hidden] -> [tokens, heads, value_dim]; nothing is cached."""
        q, k, v = self._project(self.qkv(x), batch.positions)
        return attend_rows(q, k, v, step_segments(batch), window=self.window, scale=self.scale)


class WholeRowLatentAttention(LatentAttention):
    """Latent attention whose tokens see their whole row."""

    def make_cache(self, b: Builder, spec: AttentionSpec) -> None:
        self.scale = spec.scale

    def attend(self, q: Tensor, k: Tensor, x: Tensor, compressed: Tensor, batch: Batch) -> Tensor:
        return attend_rows(q, k, k[..., : self.rank], step_segments(batch), scale=self.scale)


class TextVectors:
    """Makes a decoder a model of vectors: `class FooModel(TextVectors, FooForCausalLM)`.

    Its files may have the names of a whole decoder or those without the first part. `pooling` of
    config.json is the default pooling type: "avg", "cls" or "last".
    """

    tasks: ClassVar[tuple[str, ...]] = ("embed", "token_embed")
    heads: ClassVar[tuple[str, ...]] = ()
    root: ClassVar[str]
    config: Any

    def make_head(self, config: Any, b: Builder) -> Any:
        """Make what is applied to pooled vectors: nothing."""
        return Identity()

    @property
    def pooling(self) -> str:
        """Default pooling type."""
        name = getattr(self.config, "pooling", None)
        return _POOLING.get(str(name), "LAST")

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names: WeightNames = super().weights(config)  # type: ignore[misc]
        others = [f"{head}\\." for head in ("lm_head", *cls.heads)]
        bare = rf"^(?!{cls.root}\.|{'|'.join(others)})"
        unused = [rf"^{head}\." for head in ("lm_head", "score") if head not in cls.heads]
        return evolve(
            names,
            rename=((bare, f"{cls.root}."), *names.rename),
            ignore=(*names.ignore, *unused),
        )


class TextClasses(TextVectors):
    """Makes a decoder a classifier or, with one class, a reranker: a linear layer `score`."""

    tasks = ("classify", "token_classify")
    heads = ("score",)

    def make_head(self, config: Any, b: Builder) -> Module:
        head: Module = b.linear("score", config.hidden_size, config.classes, split=False)
        return head
