"""BLIP-2 (arXiv 2301.12597): learned queries read an image's patches for OPT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import ModuleList

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError, UnsupportedError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import AttentionNames, size
from modulm_towers import (
    Block,
    BlockNames,
    BlockShape,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    QFormer,
    QFormerConfig,
    Tower,
    flat_patches,
    patches,
    stacked,
    through,
    tiny_text,
)

__all__ = ["Blip2Config", "Blip2ForConditionalGeneration"]

_NAMES = BlockNames(projections=AttentionNames("q", "k", "v", "projection", "qkv"))


@frozen(kw_only=True)
class _TowerConfig:
    """`vision_config`."""

    hidden_size: int = size(1408)
    intermediate_size: int = size(6144)
    num_hidden_layers: int = size(39)
    num_attention_heads: int = size(16)
    image_size: int = size(224)
    patch_size: int = size(14)
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-6
    qkv_bias: bool = True

    def __attrs_post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("num_attention_heads: does not divide hidden_size")
        if self.patch_size > self.image_size:
            raise ValueError("patch_size: larger than image_size")


@frozen(kw_only=True)
class _Keys:
    num_query_tokens: int = size(32)


@frozen(eq=False, kw_only=True)
class Blip2Config(MultimodalConfig):
    """config.json of BLIP-2. queries: settings of the querying transformer."""

    vision_type: ClassVar[type | None] = _TowerConfig
    top_level_type: ClassVar[type | None] = _Keys

    queries: QFormerConfig

    @classmethod
    def more(cls, keys: Mapping[str, Any], file: str) -> dict[str, Any]:
        table = keys.get("qformer_config")
        if not isinstance(table, Mapping):
            raise CheckpointError(f"{file}: qformer_config: must be a table")
        return {"queries": read_config(table, QFormerConfig, file)}


class _Tower(Tower):
    """A class token, then the patches of an image of one size."""

    first: Tensor
    positions: Tensor

    def __init__(self, c: _TowerConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype, hidden = c, b.shared.dtype, c.hidden_size
        at, count = b.at("embeddings"), (c.image_size // c.patch_size) ** 2 + 1
        pixels = 3 * c.patch_size**2
        self.patch = at.linear("patch_embedding", pixels, hidden, bias=True, split=False)
        at.parameter("class_embedding", self, "first", (1, 1, hidden))
        at.parameter("position_embedding", self, "positions", (1, count, hidden))
        shape = BlockShape(
            hidden=hidden, inner=c.intermediate_size, heads=c.num_attention_heads,
            act=c.hidden_act, eps=c.layer_norm_eps, bias=c.qkv_bias, names=_NAMES,
        )  # fmt: skip
        layers = range(c.num_hidden_layers)
        self.layers = ModuleList(Block(b.at(f"encoder.layers.{i}"), shape) for i in layers)
        self.post = b.layer_norm("post_layernorm", hidden, c.layer_norm_eps)

    def run(self, pixels: Tensor) -> Pieces[Tensor]:
        """[n, channels, height, width] -> [n, 1 + patches, hidden]."""
        n, side = len(pixels), self.config.image_size
        if pixels.shape[-2:] != (side, side):
            raise UnsupportedError(f"images of {list(pixels.shape[-2:])} pixels, not {side}")
        cut = patches(pixels.to(self.dtype), self.config.patch_size)
        x = self.patch(cut.flatten(0, 1)).view(n, cut.shape[1], -1)
        x = torch.cat([self.first.expand(n, 1, -1), x], dim=1) + self.positions
        shape = x.shape
        x = yield from through(self.layers, x.flatten(0, 1), [shape[1]] * n)
        out: Tensor = self.post(x).view(shape)
        return out


class Blip2ForConditionalGeneration(MultimodalModel):
    """BLIP-2 before OPT."""

    api = 1
    config_type: ClassVar[type] = Blip2Config
    names = WeightNames(
        rename=((r"^model\.(qformer|query_tokens|language_projection)\b", r"\1"),),
        rewrite=(flat_patches(r"\.patch_embedding\.weight$"),),
    )
    queries: Tensor

    def make_encoders(self, config: Blip2Config, b: Builder) -> None:
        width, count = config.queries.hidden_size, config.top_level.num_query_tokens
        self.tower = _Tower(config.vision, b.at("vision_model"))
        b.parameter("query_tokens", self, "queries", (1, count, width))
        self.reader = QFormer(config.queries, b.at("qformer"))
        name = "language_projection"
        self.projector = b.linear(name, width, config.hidden_size, bias=True, split=False)

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        pixels, counts = stacked(self, items, "pixel_values")
        states = yield from self.tower.run(pixels)
        read = self.projector(self.reader(self.queries[0], states))
        return [part.flatten(0, 1) for part in torch.split(read, counts)]

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["Blip2ForConditionalGeneration"],
            "model_type": "blip-2",
            "image_token_index": 480,
            "num_query_tokens": 4,
            "tie_word_embeddings": False,
            "text_config": tiny_text(
                "opt", ffn_dim=96, word_embed_proj_dim=64, tie_word_embeddings=False
            ),
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 7,
            },
            "qformer_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 48,
                "encoder_hidden_size": 32,
            },
        }
