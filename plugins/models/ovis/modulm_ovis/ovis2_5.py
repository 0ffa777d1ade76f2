"""Ovis 2.5 and 2.6 (arXiv 2508.11737): SigLIP 2 for images of any size, and a visual vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import ModuleList

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import only, size
from modulm_towers import (
    Block,
    BlockShape,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    TextConfig,
    Tower,
    axial_turns,
    flat_patches,
    grid_coordinates,
    lengths_of,
    through,
    tiny_text,
)

__all__ = ["Ovis25Config", "Ovis25ForConditionalGeneration", "Ovis26MoeForCausalLM"]

Grids = Sequence[Sequence[int]]
_HEAD_EPS = 1e-5
#: The last entries of the visual vocabulary: start and end of an image, and of a video.
_INDICATORS = 4


@frozen(kw_only=True)
class _TowerConfig:
    """`vit_config`. num_patches: of the square of learned positions, -1 for the image's. Squares
    of hidden_stride patches on a side become one token.
    """

    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    num_channels: int = size(3)
    image_size: int = size(512)
    patch_size: int = size(16)
    num_patches: int = -1
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    hidden_stride: int = size(2)
    temporal_patch_size: int = size(1)
    fullatt_block_indexes: str | None = None
    preserve_original_pe: bool = True
    use_rope: bool = True

    def __attrs_post_init__(self) -> None:
        only(
            self,
            temporal_patch_size=(1,),
            fullatt_block_indexes=(None,),
            preserve_original_pe=(True,),
            use_rope=(True,),
        )
        if self.hidden_size % self.num_attention_heads or self.head_dim % 4:
            raise ValueError(
                f"num_attention_heads: {self.num_attention_heads} heads of {self.hidden_size} "
                "cannot be rotated"
            )
        if self.num_patches > 0 and round(self.num_patches**0.5) ** 2 != self.num_patches:
            raise ValueError(f"num_patches: {self.num_patches} is not a square")
        if self.patch_size > self.image_size:
            raise ValueError("patch_size: larger than image_size")

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def side(self) -> int:
        """The side of the square of learned positions."""
        if self.num_patches > 0:
            return round(self.num_patches**0.5)
        return self.image_size // self.patch_size


@frozen(kw_only=True)
class _Keys:
    """Top-level keys. visual_vocab_size: visual words, with the indicators."""

    visual_vocab_size: int = size(65536)

    def __attrs_post_init__(self) -> None:
        if self.visual_vocab_size <= _INDICATORS:
            raise ValueError(f"visual_vocab_size: not above {_INDICATORS}")


@frozen(eq=False, kw_only=True)
class Ovis25Config(MultimodalConfig):
    """config.json of Ovis 2.5 and 2.6: `llm_config` beside `vit_config`."""

    vision_type: ClassVar[type] = _TowerConfig
    top_level_type: ClassVar[type | None] = _Keys

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        text, vision = table.get("llm_config") or table.get("text_config"), table.get("vit_config")
        if not isinstance(text, Mapping):
            raise CheckpointError(f"{file}: llm_config: must be a table")
        if not isinstance(vision, Mapping):
            raise CheckpointError(f"{file}: vit_config: must be a table")
        return cls(
            text=TextConfig.from_table({**table, "text_config": text}, file),
            vision=read_config(vision, _TowerConfig, file),
            top_level=read_config(dict(table), _Keys, file),
        )


class _Tower(Tower):
    """SigLIP 2 with rotary positions; patches are ordered by squares. A head gives visual words."""

    positions: Tensor

    def __init__(self, c: _TowerConfig, words: int, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype, hidden = c, b.shared.dtype, c.hidden_size
        inner = b.at("vit.vision_model")
        at, pixels = inner.at("embeddings"), c.num_channels * c.patch_size**2
        self.patch = at.linear("patch_embedding", pixels, hidden, bias=True, split=False)
        at.parameter("position_embedding.weight", self, "positions", (c.side**2, hidden))
        block = BlockShape(
            hidden=hidden, inner=c.intermediate_size, heads=c.num_attention_heads,
            act=c.hidden_act, eps=c.layer_norm_eps,
        )  # fmt: skip
        layers = range(c.num_hidden_layers)
        self.layers = ModuleList(Block(inner.at(f"encoder.layers.{i}"), block) for i in layers)
        self.post = inner.layer_norm("post_layernorm", hidden, c.layer_norm_eps)
        self.head = b.linear("head.0", hidden * c.hidden_stride**2, words, split=False)
        self.norm = b.layer_norm("head.1", words, _HEAD_EPS)

    def run(self, pixels: Tensor, grids: Grids) -> Pieces[Tensor]:
        """pixels: [patches, values per patch] -> [tokens, words], probabilities. grids: (frames,
        rows, columns) of patches of each image.
        """
        c = self.config
        coordinates = [grid_coordinates(grid, c.hidden_stride) for grid in grids]
        pairs = zip(grids, coordinates, strict=True)
        positions = torch.cat([self._positions(*pair) for pair in pairs])
        x = self.patch(pixels.to(self.dtype))
        x = x + positions.to(x.dtype)
        turns = axial_turns(torch.cat(coordinates), c.head_dim).to(x.device)
        x = yield from through(self.layers, x, lengths_of(grids), turns)
        squares = self.post(x).unflatten(0, (-1, c.hidden_stride**2)).flatten(1)
        logits: Tensor = self.norm(self.head(squares))
        return torch.softmax(logits.float(), dim=-1).to(logits.dtype)

    def _positions(self, grid: Sequence[int], coordinates: Tensor) -> Tensor:
        """[patches, hidden]: learned positions, interpolated bicubically to the grid."""
        _, rows, columns = grid
        square = self.positions.float().view(1, self.config.side, self.config.side, -1)
        resized = F.interpolate(square.permute(0, 3, 1, 2), (rows, columns), mode="bicubic")
        row, column = coordinates.to(resized.device).unbind(-1)
        return resized[0].flatten(1).T[row * columns + column]


class Ovis25ForConditionalGeneration(MultimodalModel):
    """Ovis 2.5 and 2.6 with Qwen 3; images only."""

    api = 1
    config_type: ClassVar[type] = Ovis25Config
    names = WeightNames(
        rename=((r"^llm\.", ""),), rewrite=(flat_patches(r"\.patch_embedding\.weight$"),)
    )
    table: Tensor

    def make_encoders(self, config: Ovis25Config, b: Builder) -> None:
        words = config.top_level.visual_vocab_size
        self.tower = _Tower(config.vision, words - _INDICATORS, b.at("visual_tokenizer"))
        b.parameter("vte.weight", self, "table", (words, config.hidden_size))

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        pixels = torch.cat([self.tensor(item, "pixel_values") for item in items])
        grids = [item.tensors["image_grid_thw"].reshape(-1, 3).tolist() for item in items]
        seen = yield from self.tower.run(pixels, [grid for each in grids for grid in each])
        merged = self.config.vision.hidden_stride**2
        start, end = self.table[-_INDICATORS:][:2].unbind(0)
        embeddings = seen @ self.table[:-_INDICATORS]
        counts = [sum(t * h * w for t, h, w in each) // merged for each in grids]
        return [torch.cat([start[None], part, end[None]]) for part in embeddings.split(counts)]

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return _tiny("Ovis2_5", "ovis2_5", tiny_text("qwen3", head_dim=16))


class Ovis26MoeForCausalLM(Ovis25ForConditionalGeneration):
    """Ovis 2.6 with experts."""

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        text = tiny_text("qwen3_moe", head_dim=16, **experts)
        return _tiny("Ovis2_6_MoeForCausalLM", "ovis2_6_moe", text)


def _tiny(architecture: str, model_type: str, text: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": 64,
        "visual_vocab_size": 60,
        "llm_config": {**text, "tie_word_embeddings": False},
        "vit_config": {
            "model_type": "siglip2_navit",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
            "hidden_stride": 2,
        },
    }
