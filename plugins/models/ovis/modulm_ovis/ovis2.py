"""Ovis 2 (arXiv 2405.20797): patches become probabilities over a visual vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import Identity, Module, ModuleList

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames
from modulm_layers import AttentionNames, only, size
from modulm_towers import (
    Block,
    BlockNames,
    BlockShape,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    Tower,
    flat_patches,
    patches,
    stacked,
    through,
    tiny_text,
)

__all__ = ["Ovis2Config", "Ovis2ForConditionalGeneration"]

_EPS = 1e-5
_NAMES = BlockNames(
    norm1="rms_norm1",
    attn="attention",
    projections=AttentionNames("q_proj", "k_proj", "v_proj", "out_proj", "qkv_proj"),
    norm2="rms_norm2",
    mlp="ffn",
    up="up_proj",
    down="down_proj",
)


@frozen(kw_only=True)
class _TowerConfig:
    """`vision_config`. vocab_size: of the visual vocabulary, whose last entries are those of
    `visual_indicator_token_ids`. tokenize_function: how logits become probabilities.
    """

    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    num_channels: int = size(3)
    image_size: int = size()
    patch_size: int = size()
    rms_norm_eps: float = 1e-5
    qkv_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    vocab_size: int = size()
    hidden_stride: int = size(1)
    num_visual_indicator_tokens: int = size(5)
    tokenize_function: str = "softmax"

    def __attrs_post_init__(self) -> None:
        only(self, tokenize_function=("softmax", "st_argmax"))
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("num_attention_heads: does not divide hidden_size")
        if self.patch_size > self.image_size:
            raise ValueError("patch_size: larger than image_size")
        if self.num_visual_indicator_tokens >= self.vocab_size:
            raise ValueError("num_visual_indicator_tokens: not fewer than vocab_size")

    @property
    def side(self) -> int:
        """Patches along a side."""
        return self.image_size // self.patch_size

    @property
    def words(self) -> int:
        """Visual words for patches."""
        return self.vocab_size - self.num_visual_indicator_tokens


@frozen(eq=False, kw_only=True)
class Ovis2Config(MultimodalConfig):
    """config.json of Ovis 2. indicators: tokens that are embedded with the visual vocabulary."""

    vision_type: ClassVar[type] = _TowerConfig

    indicators: tuple[int, ...] = ()

    @classmethod
    def more(cls, keys: Mapping[str, Any], file: str) -> dict[str, Any]:
        indicators = tuple(keys["visual_indicator_token_ids"])
        if len(indicators) != keys["vision_config"]["num_visual_indicator_tokens"]:
            raise CheckpointError(
                f"{file}: visual_indicator_token_ids: {len(indicators)} of "
                f"{keys['vision_config']['num_visual_indicator_tokens']}"
            )
        return {"indicators": indicators}


class _Tower(Tower):
    """AIMv2 (arXiv 2411.14402) on images of one size, with a head for visual words.

    normed: whether a norm follows the layers.
    """

    positions: Tensor

    def __init__(self, c: _TowerConfig, b: Builder, *, normed: bool) -> None:
        super().__init__()
        self.config, self.dtype, hidden = c, b.shared.dtype, c.hidden_size
        inner, pixels = b.at("transformer"), c.num_channels * c.patch_size**2
        at = inner.at("embeddings")
        self.patch = at.linear("patch_embedding", pixels, hidden, bias=True, split=False)
        at.parameter("position_embedding.weight", self, "positions", (c.side**2, hidden))
        self.first = at.rms_norm("rms_norm", hidden, c.rms_norm_eps)
        block = BlockShape(
            hidden=hidden, inner=c.intermediate_size, heads=c.num_attention_heads,
            act=c.hidden_act, eps=c.rms_norm_eps, rms=True, gated=True, bias=c.qkv_bias,
            out_bias=c.qkv_bias, mlp_bias=c.mlp_bias, names=_NAMES,
        )  # fmt: skip
        layers = range(c.num_hidden_layers)
        self.layers = ModuleList(Block(inner.at(f"encoder.layers.{i}"), block) for i in layers)
        end = inner.rms_norm("rms_norm", hidden, c.rms_norm_eps) if normed else Identity()
        self.last: Module = end
        self.head = b.linear("head_linear", hidden * c.hidden_stride**2, c.words, split=False)
        self.norm = b.layer_norm("head_norm", c.words, _EPS)

    def run(self, pixels: Tensor) -> Pieces[Tensor]:
        """[n, channels, height, width] -> [n, tokens, words], probabilities."""
        c, n = self.config, len(pixels)
        cut = patches(pixels.to(self.dtype), c.patch_size)
        x = self.first(self.patch(cut.flatten(0, 1))).view(n, cut.shape[1], -1) + self.positions
        x = x.flatten(0, 1)
        x = yield from through(self.layers, x, [c.side**2] * n)
        x = _squares(self.last(x).view(n, c.side, c.side, -1), c.hidden_stride)
        logits = self.norm(self.head(x.flatten(0, 1))).view(*x.shape[:2], -1)
        if c.tokenize_function == "softmax":
            return torch.softmax(logits.float(), dim=-1).to(logits.dtype)
        return F.one_hot(logits.argmax(-1), c.words).to(logits.dtype)


class Ovis2ForConditionalGeneration(MultimodalModel):
    """Ovis 2; the text model is Qwen 2.5."""

    api = 1
    config_type: ClassVar[type] = Ovis2Config
    names = WeightNames(rewrite=(flat_patches(r"\.patch_embedding\.weight$"),))
    #: Whether the words come from states after the encoder's last norm.
    normed: ClassVar[bool] = True
    table: Tensor

    def make_encoders(self, config: Ovis2Config, b: Builder) -> None:
        self.tower = _Tower(config.vision, b.at("vision_tower"), normed=self.normed)
        shape = (config.vision.vocab_size, config.hidden_size)
        b.parameter("visual_embeddings_table.weight", self, "table", shape)

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        pixels, counts = stacked(self, items, "pixel_values")
        vocabulary = self.config.vision.words
        seen = yield from self.tower.run(pixels)
        embeddings = (seen @ self.table[:vocabulary]).split(counts)
        return [
            self._whole(item, item_tiles)
            for item, item_tiles in zip(items, embeddings, strict=True)
        ]

    def _whole(self, item: MediaItem, tiles: Tensor) -> Tensor:
        """tiles: [n, tokens, hidden] -> [length, hidden], with the indicator tokens' embeddings."""
        tokens = self.tensor(item, "tokens")
        embeddings = tiles.new_empty(len(tokens), tiles.shape[-1])
        inside = torch.ones_like(tokens, dtype=torch.bool)
        for index, token in enumerate(self.config.indicators):
            embeddings[tokens == token] = self.table[self.config.vision.words + index]
            inside &= tokens != token
        embeddings[inside] = tiles.flatten(0, 1)
        return embeddings

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["Ovis2ForConditionalGeneration"],
            "model_type": "ovis2",
            "image_token_id": 481,
            "visual_indicator_token_ids": [482, 483, 484, 485, 486],
            "tie_word_embeddings": False,
            "hidden_size": 64,
            "vocab_size": 512,
            "text_config": tiny_text("qwen2"),
            "vision_config": {
                "model_type": "ovis2_vision",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 7,
                "vocab_size": 60,
                "hidden_stride": 2,
                "num_visual_indicator_tokens": 5,
            },
        }


def _squares(x: Tensor, stride: int) -> Tensor:
    """[n, rows, columns, hidden] -> [n, tokens, stride * stride * hidden], zero-padded."""
    more = -x.shape[1] % stride
    x = F.pad(x, (0, 0, 0, more, 0, more))
    n, rows, columns, hidden = x.shape
    x = x.view(n, rows // stride, stride, columns // stride, stride, hidden)
    return x.transpose(2, 3).reshape(n, -1, stride * stride * hidden)
