"""DeepSeek-OCR 1 and 2 as published (arXiv 2510.18234): SAM, then CLIP or learned queries.

config.json has `language_config` for the text model. It does not have the encoders' sizes, which
are those of SAM-B, CLIP-L/14 and Qwen 2 0.5B unless `vision_config` has transformers' tables.
"""

from __future__ import annotations

import math
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
from modulm_deepseek.deepseek_ocr2 import DeepseekOcr2ForConditionalGeneration, SightConfig
from modulm_layers import only, size
from modulm_towers import (
    Block,
    BlockShape,
    MultimodalConfig,
    Pieces,
    SamConfig,
    SamTower,
    TextConfig,
    Tower,
    stacked,
    through,
)

__all__ = [
    "DeepseekOcr2PublishedConfig",
    "DeepseekOcr2PublishedForCausalLM",
    "DeepseekOcrConfig",
    "DeepseekOcrForCausalLM",
]

#: The sizes of published models.
_SAM1: Mapping[str, Any] = {"downsample_channels": [512, 1024]}
_CLIP: Mapping[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 224, "patch_size": 14,
}  # fmt: skip
_QUERIES: Mapping[str, Any] = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2,
}  # fmt: skip


def _published(table: Mapping[str, Any], file: str) -> tuple[TextConfig, Mapping[str, Any]]:
    """(the text model, `vision_config`) of config.json. Raises CheckpointError."""
    text, vision = table.get("language_config"), table.get("vision_config") or {}
    if not isinstance(text, Mapping) or not isinstance(vision, Mapping):
        raise CheckpointError(f"{file}: language_config, vision_config: must be tables")
    if text.get("use_mla", False):
        raise CheckpointError(f"{file}: language_config.use_mla: not supported yet: true")
    inner = {**table, "text_config": {**text, "model_type": "deepseek_ocr2_text"}}
    return TextConfig.from_table(inner, file), vision


@frozen(eq=False, kw_only=True)
class DeepseekOcr2PublishedConfig(MultimodalConfig):
    """config.json of DeepSeek-OCR 2 as published."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        text, vision = _published(table, file)
        parts = {
            "sam_config": vision.get("sam_config") or {},
            "encoder_config": vision.get("encoder_config") or _QUERIES,
        }
        return cls(text=text, vision=SightConfig.from_table(parts, file))


class DeepseekOcr2PublishedForCausalLM(DeepseekOcr2ForConditionalGeneration):
    """DeepSeek-OCR 2 as published."""

    config_type = DeepseekOcr2PublishedConfig

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return _tiny("DeepseekOCR2ForCausalLM", super().tiny())


@frozen(kw_only=True)
class _ClipConfig:
    """`encoder_config`: CLIP, whose patches are SAM's."""

    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    image_size: int = size(224)
    patch_size: int = size(14)
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5

    def __attrs_post_init__(self) -> None:
        only(self, hidden_act=("quick_gelu",))
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("num_attention_heads: does not divide hidden_size")
        if self.patch_size > self.image_size:
            raise ValueError("patch_size: larger than image_size")

    @property
    def side(self) -> int:
        """Learned positions along a side."""
        return self.image_size // self.patch_size


@frozen(kw_only=True)
class _SightConfig:
    """`vision_config`."""

    sam_config: SamConfig
    encoder_config: _ClipConfig


@frozen(eq=False, kw_only=True)
class DeepseekOcrConfig(MultimodalConfig):
    """config.json of DeepSeek-OCR as published."""

    vision_type: ClassVar[type | None] = _SightConfig

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        text, vision = _published(table, file)
        sam = read_config(vision.get("sam_config") or _SAM1, SamConfig, file)
        clip = read_config(vision.get("encoder_config") or _CLIP, _ClipConfig, file)
        if sam.downsample_channels[-1] != clip.hidden_size:
            raise CheckpointError(
                f"{file}: downsample_channels: {sam.downsample_channels} before an encoder of "
                f"hidden_size {clip.hidden_size}"
            )
        return cls(text=text, vision=_SightConfig(sam_config=sam, encoder_config=clip))


class _Clip(Tower):
    """CLIP's layers over SAM's tokens."""

    first: Tensor
    positions: Tensor

    def __init__(self, c: _ClipConfig, b: Builder) -> None:
        super().__init__()
        self.config, at = c, b.at("embeddings")
        at.parameter("class_embedding", self, "first", (c.hidden_size,))
        name, shape = "position_embedding.weight", (c.side**2 + 1, c.hidden_size)
        at.parameter(name, self, "positions", shape)
        self.norm = b.layer_norm("pre_layrnorm", c.hidden_size, c.layer_norm_eps)
        block = BlockShape(
            hidden=c.hidden_size, inner=c.intermediate_size, heads=c.num_attention_heads,
            act=c.hidden_act, eps=c.layer_norm_eps,
        )  # fmt: skip
        layers = range(c.num_hidden_layers)
        self.layers = ModuleList(Block(b.at(f"transformer.layers.{i}"), block) for i in layers)

    def run(self, tokens: Tensor) -> Pieces[Tensor]:
        """[n, tokens, hidden] -> the same."""
        n, count, hidden = tokens.shape
        x = torch.cat([self.first.expand(n, 1, hidden), tokens], dim=1) + self._stretched(count)
        x = self.norm(x.flatten(0, 1))
        x = yield from through(self.layers, x, [count + 1] * n)
        out: Tensor = x.view(n, count + 1, hidden)[:, 1:]
        return out

    def _stretched(self, count: int) -> Tensor:
        """[1 + count, hidden]: the learned positions, resized."""
        side = math.isqrt(count)
        if side == self.config.side:
            return self.positions
        table = self.positions[1:].float().view(1, self.config.side, self.config.side, -1)
        resized = F.interpolate(
            table.permute(0, 3, 1, 2), (side, side), mode="bicubic", antialias=True
        )
        flat = resized[0].flatten(1).T.to(self.positions.dtype)
        return torch.cat([self.positions[:1], flat])


class DeepseekOcrForCausalLM(DeepseekOcr2ForConditionalGeneration):
    """DeepSeek-OCR: tokens of SAM and CLIP; each row of them ends with a learned token."""

    config_type = DeepseekOcrConfig
    names = WeightNames(
        rename=(
            (r"^model\.vision_model\.", "vision_model."),
            *DeepseekOcr2ForConditionalGeneration.names.rename,
        ),
        ignore=(r"^vision_model\.embeddings\.(patch_embedding\.|position_ids)",),
        rewrite=DeepseekOcr2ForConditionalGeneration.names.rewrite,
    )
    newline: Tensor

    def make_encoders(self, config: Any, b: Builder) -> None:
        c, hidden = config.vision, config.hidden_size
        self.sam = SamTower(c.sam_config, b.at("vision_tower.sam_encoder"))
        self.clip = _Clip(c.encoder_config, b.at("vision_model"))
        width = c.encoder_config.hidden_size + c.sam_config.downsample_channels[-1]
        self.projector = b.linear("multi_modal_projector", width, hidden, bias=True, split=False)
        b.parameter("view_separator", self, "separator", (hidden,))
        b.parameter("image_newline", self, "newline", (hidden,))

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        views, _ = stacked(self, items, "pixel_values")
        overviews = yield from self._views(views)
        embeddings = []
        for item, view in zip(items, overviews, strict=True):
            parts = [self._lines(view[None], 1), self.separator[None]]
            if "pixel_values_local" in item.tensors:
                tiles = yield from self._views(self.tensor(item, "pixel_values_local"))
                columns = int(item.tensors["tile_columns"].reshape(-1)[0])
                parts.insert(0, self._lines(tiles, columns))
            embeddings.append(torch.cat(parts))
        return embeddings

    def _lines(self, tiles: Tensor, columns: int) -> Tensor:
        """[tiles, tokens, hidden] of rows of `columns` tiles -> [tokens, hidden], line by line."""
        side, hidden = math.isqrt(tiles.shape[1]), tiles.shape[2]
        grid = tiles.view(-1, columns, side, side, hidden).transpose(1, 2)
        lines = grid.reshape(-1, columns * side, hidden)
        ends = self.newline.expand(len(lines), 1, hidden)
        return torch.cat([lines, ends], dim=1).flatten(0, 1)

    def _views(self, pixels: Tensor) -> Pieces[Tensor]:
        seen = yield from self.sam.run(pixels)
        read = yield from self.clip.run(seen)
        both = torch.cat([read, seen], dim=-1)
        tokens: Tensor = self.projector(both.flatten(0, 1)).unflatten(0, both.shape[:2])
        return tokens

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        table = _tiny("DeepseekOCRForCausalLM", super().tiny())
        clip = {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 7,
        }  # fmt: skip
        return {**table, "vision_config": {**table["vision_config"], "encoder_config": clip}}


def _tiny(architecture: str, table: Mapping[str, Any]) -> dict[str, Any]:
    text = {**table["text_config"], "first_k_dense_replace": 1, "use_mla": False}
    del text["mlp_layer_types"]
    others = {key: value for key, value in table.items() if key != "text_config"}
    names = {"architectures": [architecture], "model_type": "deepseek_vl_v2"}
    return {**others, **names, "language_config": {**text, "tie_word_embeddings": False}}
