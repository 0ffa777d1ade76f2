"""SigLIP 2 with native aspect ratios (NaFlex, arXiv 2502.14786)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import ModuleList

from modulm.contracts.media import MediaItem
from modulm.nn import Builder
from modulm_layers import size
from modulm_siglip.clip import TextTower
from modulm_siglip.siglip import Pool, SiglipConfig, SiglipModel
from modulm_towers import Block, BlockShape, Pieces, Tower, whole

__all__ = ["NaflexConfig", "NaflexTower", "Siglip2Model", "Siglip2VisionConfig"]


@frozen(kw_only=True)
class Siglip2VisionConfig:
    """`vision_config` of SigLIP 2. num_patches: of the square of learned positions."""

    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    num_channels: int = size(3)
    patch_size: int = size(16)
    num_patches: int = size(256)
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6

    def __attrs_post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("num_attention_heads: does not divide hidden_size")
        if round(self.num_patches**0.5) ** 2 != self.num_patches:
            raise ValueError(f"num_patches: {self.num_patches} is not a square")


class NaflexConfig(SiglipConfig):
    """config.json of SigLIP 2 for images of any size."""

    vision_type: ClassVar[type] = Siglip2VisionConfig


class NaflexTower(Tower):
    """Encodes the concatenated patches of all images, with interpolated positions."""

    positions: Tensor

    def __init__(self, c: Siglip2VisionConfig, b: Builder) -> None:
        super().__init__()
        self.config, hidden, at = c, c.hidden_size, b.at("embeddings")
        pixels = c.num_channels * c.patch_size**2
        self.patch = at.linear("patch_embedding", pixels, hidden, bias=True, split=False)
        shape = (c.num_patches, hidden)
        at.parameter("position_embedding.weight", self, "positions", shape)
        block = BlockShape(
            hidden=hidden, inner=c.intermediate_size, heads=c.num_attention_heads,
            act=c.hidden_act, eps=c.layer_norm_eps,
        )  # fmt: skip
        layers = range(c.num_hidden_layers)
        self.layers = ModuleList(Block(b.at(f"encoder.layers.{i}"), block) for i in layers)
        self.post = b.layer_norm("post_layernorm", hidden, c.layer_norm_eps)

    def run(self, pixels: Tensor, grids: Sequence[Sequence[int]]) -> Pieces[Tensor]:
        """pixels: [patches, values per patch], row by row of images of (rows, columns) -> [patches,
        hidden].
        """
        positions = {(rows, columns): self._stretched(rows, columns) for rows, columns in grids}
        x = self.patch(pixels) + torch.cat([positions[rows, columns] for rows, columns in grids])
        lengths = [rows * columns for rows, columns in grids]
        for layer in self.layers:
            x = layer(x, lengths)
            yield len(x)
        out: Tensor = self.post(x)
        return out

    def _stretched(self, rows: int, columns: int) -> Tensor:
        """Interpolate the positions: [rows * columns, hidden]."""
        side = round(self.config.num_patches**0.5)
        table = self.positions.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        resized = F.interpolate(
            table, size=(rows, columns), mode="bilinear", align_corners=False, antialias=True
        )
        return resized[0].flatten(1).T.to(self.positions.dtype)


class Siglip2Model(SiglipModel):
    """SigLIP 2 with images in their native aspect ratio."""

    config_type: ClassVar[type] = NaflexConfig

    def make(self, config: Any, b: Builder) -> None:
        self.text = TextTower(config.text, b.at("text_model"), causal=False)
        self.tower = NaflexTower(config.vision, b.at("vision_model"))
        self.pool = Pool(config.vision, b.at("vision_model.head"))
        inputs, width = config.text.hidden_size, config.hidden_size
        self.text_out = b.linear("text_model.head", inputs, width, bias=True, split=False)

    def encode(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        grids = [item.tensors["spatial_shapes"].reshape(-1).tolist() for item in items]
        pixels = [torch.from_numpy(np.array(item.tensors["pixel_values"])) for item in items]
        lengths = [len(image) for image in pixels]
        states = whole(self.tower.run(torch.cat(pixels).to(self.device, self.dtype), grids))
        pooled: Tensor = self.pool(states, lengths)
        return list(pooled.split(1))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        like = super().tiny()
        text = {**like["text_config"], "model_type": "siglip2_text_model"}
        vision = {**like["vision_config"], "model_type": "siglip2_vision_model"}
        del vision["image_size"]
        return {
            "architectures": ["Siglip2Model"],
            "model_type": "siglip2",
            "text_config": text,
            "vision_config": {**vision, "num_patches": 16, "patch_size": 16},
        }
