"""LLaVA-OneVision 2 (2026): an encoder with positions in time, row and column before Qwen 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import PlainMLP, size
from modulm_towers import (
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    TextConfig,
    Tower,
    flat_patches,
    grid_coordinates,
    tiny_text,
)

__all__ = ["LlavaOnevision2Config", "LlavaOnevision2ForConditionalGeneration"]

#: Sixteenths of a head's angles that follow rows, and columns; the first four follow time.
_SIDE = 6


@frozen(kw_only=True)
class _VisionConfig:
    """`vision_config`."""

    hidden_size: int = size(1024)
    intermediate_size: int = size(4096)
    num_hidden_layers: int = size(24)
    num_attention_heads: int = size(16)
    num_channels: int = size(3)
    patch_size: int = size(14)
    spatial_merge_size: int = size(2)
    layer_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def __attrs_post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads or self.head_size % 32:
            raise ValueError("num_attention_heads: heads must have multiples of 32 dimensions")

    @property
    def head_size(self) -> int:
        """Dimensions of a head."""
        return self.hidden_size // self.num_attention_heads

    def angles(self, coordinates: Tensor) -> Tensor:
        """coordinates: [patches, 2] of an image's rows and columns -> [patches, head_size]."""
        unit = self.head_size // 32
        count = _SIDE * unit
        waves = 1.0 / self.rope_theta ** (torch.arange(count, dtype=torch.float32) / count)
        sides = (coordinates[:, :, None].float() * waves).flatten(1)
        # An image is at time zero.
        half = torch.cat([sides.new_zeros(len(sides), 4 * unit), sides], dim=1)
        return torch.cat([half, half], dim=1)


@frozen(eq=False, kw_only=True)
class LlavaOnevision2Config(MultimodalConfig):
    """config.json of LLaVA-OneVision 2."""

    vision_type: ClassVar[type] = _VisionConfig

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        text, vision = table.get("text_config"), table.get("vision_config")
        if not isinstance(text, Mapping) or not isinstance(vision, Mapping):
            raise CheckpointError(f"{file}: text_config, vision_config: must be tables")
        inner = {**text, "model_type": text.get("model_type", "qwen3")}
        return cls(
            text=TextConfig.from_table({**table, "text_config": inner}, file),
            vision=read_config(vision, _VisionConfig, file),
        )


class _Attention(Module):
    """Attention among an image's patches.

    Neighbors of a head's dimensions turn each other, as published by one angle for each of them,
    not for both.
    """

    def __init__(self, c: _VisionConfig, b: Builder) -> None:
        super().__init__()
        width = c.hidden_size
        self.size, self.ops = c.head_size, b.ops
        self.heads = b.shared.mesh.tensor.part(c.num_attention_heads, f"heads of {b.prefix}")
        self.qkv = b.linear("qkv", width, {"q": width, "k": width, "v": width}, bias=True)
        self.out = b.row_linear("proj", width, width, bias=True)

    def forward(self, x: Tensor, lengths: Sequence[int], angles: Tensor) -> Tensor:
        """x: [patches, hidden]; angles: [patches, 1, head_size] -> [patches, hidden]."""
        q, k, v = self.qkv(x).view(len(x), 3, self.heads, self.size).unbind(1)
        seen = self.ops.varlen_attention(_turned(q, angles), _turned(k, angles), v, lengths)
        out: Tensor = self.out(seen.flatten(1))
        return out


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """x: [patches, heads, head_size] -> the same shape."""
    wide = x.float()
    across = torch.stack([-wide[..., 1::2], wide[..., 0::2]], dim=-1).flatten(-2)
    return (wide * angles.cos() + across * angles.sin()).to(x.dtype)


class _Block(Module):
    """norm, attention, norm, feed-forward, each branch added to the stream."""

    def __init__(self, c: _VisionConfig, b: Builder) -> None:
        super().__init__()
        self.norm1 = b.layer_norm("layer_norm1", c.hidden_size, c.layer_norm_eps)
        self.attn = _Attention(c, b.at("self_attn"))
        self.norm2 = b.layer_norm("layer_norm2", c.hidden_size, c.layer_norm_eps)
        at, inner = b.at("mlp"), c.intermediate_size
        self.mlp = PlainMLP(at, c.hidden_size, inner, "gelu", bias=True, up="fc1", down="fc2")

    def forward(self, x: Tensor, lengths: Sequence[int], angles: Tensor) -> Tensor:
        """x: [patches, hidden] -> [patches, hidden]."""
        x = x + self.attn(self.norm1(x), lengths, angles)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class _Encoder(Tower):
    """Patches in the order of squares, which become tokens."""

    def __init__(self, c: _VisionConfig, b: Builder, hidden: int) -> None:
        super().__init__()
        self.config, self.dtype, self.device = c, b.shared.dtype, b.shared.device
        pixels, width, eps = c.num_channels * c.patch_size**2, c.hidden_size, c.layer_norm_eps
        name = "embeddings.patch_embedding"
        self.patch = b.linear(name, pixels, width, bias=False, split=False)
        self.first = b.layer_norm("layernorm_pre", width, eps)
        count = range(c.num_hidden_layers)
        self.blocks = ModuleList(_Block(c, b.at(f"encoder.layers.{i}")) for i in count)
        self.inner, at = width * c.spatial_merge_size**2, b.at("merger")
        self.norm = at.layer_norm("ln_q", width, eps)
        self.mlp = PlainMLP(
            at, self.inner, self.inner, "gelu", bias=True, up="mlp.0", down="mlp.2", outputs=hidden
        )

    def run(self, pixels: Tensor, grids: Sequence[Sequence[int]]) -> Pieces[Tensor]:
        """pixels: [patches, values per patch]; grids: (1, rows, columns) -> [tokens, hidden]."""
        c = self.config
        coordinates = [grid_coordinates(grid, c.spatial_merge_size) for grid in grids]
        angles = c.angles(torch.cat(coordinates))[:, None].to(self.device)
        lengths = [rows * columns for _, rows, columns in grids]
        x = self.first(self.patch(pixels.to(self.dtype)))
        for block in self.blocks:
            x = block(x, lengths, angles)
            yield len(x)
        tokens: Tensor = self.mlp(self.norm(x).reshape(-1, self.inner))
        return tokens


class LlavaOnevision2ForConditionalGeneration(MultimodalModel):
    """LLaVA-OneVision 2, of images."""

    api = 1
    config_type: ClassVar[type] = LlavaOnevision2Config
    names = WeightNames(rewrite=(flat_patches(r"\.patch_embedding\.weight$"),))

    def make_encoders(self, config: LlavaOnevision2Config, b: Builder) -> None:
        self.tower = _Encoder(config.vision, b.at("visual"), config.hidden_size)

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        grids = [item.tensors["image_grid_thw"].reshape(-1).tolist() for item in items]
        pixels = torch.cat([self.tensor(item, "pixel_values") for item in items])
        tokens = yield from self.tower.run(pixels, grids)
        square = self.config.vision.spatial_merge_size**2
        return tokens.split([rows * columns // square for _, rows, columns in grids])

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["LlavaOnevision2ForConditionalGeneration"],
            "model_type": "llava_onevision2",
            "image_token_id": 480,
            "text_config": {**tiny_text("qwen3", head_dim=16), "tie_word_embeddings": False},
            "vision_config": {
                "hidden_size": 64,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "patch_size": 4,
                "spatial_merge_size": 2,
            },
        }
