"""dots.ocr: an encoder of images of any size like Qwen2-VL's, before Qwen 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import ModuleList

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import AttentionNames, PlainMLP, only, size, tiny_config
from modulm_towers import (
    Block,
    BlockNames,
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
)

__all__ = ["DotsOcrConfig", "DotsOcrForCausalLM"]

_NAMES = BlockNames(
    "norm1", "attn", AttentionNames("q", "k", "v", "proj", "qkv"), "norm2", "mlp",
    up="fc3", down="fc2", gate="fc1",
)  # fmt: skip


@frozen(kw_only=True)
class _TowerConfig:
    """`vision_config`."""

    embed_dim: int = size(1536)
    intermediate_size: int = size(4224)
    num_hidden_layers: int = size(42)
    num_attention_heads: int = size(12)
    num_channels: int = size(3)
    patch_size: int = size(14)
    spatial_merge_size: int = size(2)
    temporal_patch_size: int = size(1)
    rms_norm_eps: float = 1e-5
    use_bias: bool = False
    post_norm: bool = True
    is_causal: bool = False

    def __attrs_post_init__(self) -> None:
        only(self, temporal_patch_size=(1,), is_causal=(False,))
        heads = self.num_attention_heads
        if self.embed_dim % heads or (self.embed_dim // heads) % 4:
            raise ValueError(f"num_attention_heads: {heads} of {self.embed_dim} cannot be rotated")


@frozen(eq=False, kw_only=True)
class DotsOcrConfig(MultimodalConfig):
    """config.json of dots.ocr: Qwen 2's keys beside `vision_config`."""

    vision_type: ClassVar[type | None] = _TowerConfig

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError."""
        vision = table.get("vision_config")
        if not isinstance(vision, Mapping):
            raise CheckpointError(f"{file}: vision_config: must be a table")
        text = {key: value for key, value in table.items() if key != "vision_config"}
        inner = {**table, "text_config": {**text, "model_type": "qwen2"}}
        return cls(
            text=TextConfig.from_table(inner, file, cls.text_ignored),
            vision=read_config(vision, _TowerConfig, file),
        )


class _Tower(Tower):
    """Patches of images of any size, with rotary positions."""

    def __init__(self, c: _TowerConfig, outputs: int, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype, self.device = c, b.shared.dtype, b.shared.device
        width, at = c.embed_dim, b.at("patch_embed.patchifier")
        pixels = c.num_channels * c.patch_size**2
        self.patch = at.linear("proj", pixels, width, bias=True, split=False)
        self.patch_norm = at.rms_norm("norm", width, c.rms_norm_eps)
        shape = BlockShape(
            hidden=width, inner=c.intermediate_size, heads=c.num_attention_heads, act="silu",
            eps=c.rms_norm_eps, rms=True, gated=True, bias=c.use_bias, out_bias=c.use_bias,
            mlp_bias=c.use_bias, names=_NAMES,
        )  # fmt: skip
        count = c.num_hidden_layers
        self.blocks = ModuleList(Block(b.at(f"blocks.{i}"), shape) for i in range(count))
        last = b.rms_norm("post_trunk_norm", width, c.rms_norm_eps) if c.post_norm else None
        self.last, self.inner = last, width * c.spatial_merge_size**2
        at = b.at("merger")
        self.norm = at.layer_norm("ln_q", width, 1e-6)
        self.merger = PlainMLP(
            at, self.inner, self.inner, "gelu", up="mlp.0", down="mlp.2", outputs=outputs
        )

    def run(self, pixels: Tensor, grids: Sequence[Sequence[int]]) -> Pieces[Tensor]:
        """pixels: [patches, values per patch] -> [tokens, outputs]. grids: (1, rows, columns) of
        each image.
        """
        c = self.config
        x = self.patch_norm(self.patch(pixels.to(self.dtype)))
        coordinates = torch.cat([grid_coordinates(grid, c.spatial_merge_size) for grid in grids])
        turns = axial_turns(coordinates, c.embed_dim // c.num_attention_heads).to(self.device)
        x = yield from through(self.blocks, x, lengths_of(grids), turns)
        x = x if self.last is None else self.last(x)
        out: Tensor = self.merger(self.norm(x).reshape(-1, self.inner))
        return out


class DotsOcrForCausalLM(MultimodalModel):
    """dots.ocr. Its text model counts the tokens of images like those of text."""

    api = 1
    config_type: ClassVar[type] = DotsOcrConfig
    names = WeightNames(rewrite=(flat_patches(r"patchifier\.proj\.weight$"),))

    def make_encoders(self, config: DotsOcrConfig, b: Builder) -> None:
        self.tower = _Tower(config.vision, config.hidden_size, b.at("vision_tower"))

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        pixels = torch.cat([self.tensor(item, "pixel_values") for item in items])
        grids = [item.tensors["image_grid_thw"].reshape(-1, 3).tolist() for item in items]
        tokens = yield from self.tower.run(pixels, [grid for some in grids for grid in some])
        merged = self.config.vision.spatial_merge_size**2
        return tokens.split([sum(t * h * w for t, h, w in some) // merged for some in grids])

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            **tiny_config("qwen2", "DotsOCRForCausalLM"),
            "model_type": "dots_ocr",
            "image_token_id": 480,
            "vision_config": {
                "embed_dim": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "patch_size": 4,
            },
        }
