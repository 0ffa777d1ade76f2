"""The vision encoder of GLM-4.1V and later (arXiv 2507.01006)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from attrs import field, frozen
from torch import Tensor
from torch.nn import ModuleList

from modulm.nn import Builder
from modulm_layers import AttentionNames, GatedMLP, size
from modulm_towers import (
    Block,
    BlockNames,
    BlockShape,
    Pieces,
    Tower,
    axial_turns,
    grid_coordinates,
    lengths_of,
    through,
)

__all__ = ["GlmTower", "GlmTowerConfig"]

_NAMES = BlockNames(
    "norm1", "attn", AttentionNames("q", "k", "v", "proj", "qkv"), "norm2", "mlp",
    "up_proj", "down_proj",
)  # fmt: skip


@frozen(kw_only=True)
class GlmTowerConfig:
    """`vision_config`. The patch size is the processor's; `image_size` determines the size of the
    learned position grid.
    """

    depth: int = size(24)
    hidden_size: int = size(1536)
    out_hidden_size: int = size(4096)
    intermediate_size: int = size(13696)
    num_heads: int = size(12)
    in_channels: int = size(3)
    image_size: int = size(336)
    patch_size: int = size(14)
    spatial_merge_size: int = size(2)
    temporal_patch_size: int = size(2)
    attention_bias: bool = False
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 4:
            raise ValueError(
                f"num_heads: {self.num_heads} heads of {self.hidden_size} cannot be rotated"
            )


class GlmTower(Tower):
    """Patches of images of any size, with rotary and learned positions.

    ocr: GLM-OCR's, which has rotary positions only, and norms of queries and keys.
    """

    def __init__(self, c: GlmTowerConfig, b: Builder, *, ocr: bool = False) -> None:
        super().__init__()
        self.ocr = ocr
        self.config, self.dtype, self.device = c, b.shared.dtype, b.shared.device
        width, merged = c.hidden_size, c.out_hidden_size
        pixels = c.in_channels * c.temporal_patch_size * c.patch_size**2
        self.patch = b.linear("patch_embed.proj", pixels, width, bias=True, split=False)
        if not ocr:
            self.patch_norm = b.rms_norm("post_conv_layernorm", width, c.rms_norm_eps)
            learned = ((c.image_size // c.patch_size) ** 2, width)
            b.parameter("embeddings.position_embedding.weight", self, "positions", learned)
        biased = ocr and c.attention_bias
        shape = BlockShape(
            hidden=width, inner=c.intermediate_size if ocr else merged, heads=c.num_heads,
            act=c.hidden_act, eps=c.rms_norm_eps, rms=True, gated=True, bias=c.attention_bias,
            out_bias=biased, mlp_bias=biased, qk_norm=ocr, head_norm=ocr, names=_NAMES,
        )  # fmt: skip
        self.blocks = ModuleList(Block(b.at(f"blocks.{i}"), shape) for i in range(c.depth))
        self.norm = b.rms_norm("post_layernorm", width, c.rms_norm_eps)
        square = c.spatial_merge_size**2 * width
        self.merge = b.linear("downsample", square, merged, bias=True, split=False)
        at = b.at("merger")
        self.proj = at.linear("proj", merged, merged, split=False)
        self.proj_norm = at.layer_norm("post_projection_norm", merged, 1e-5)
        inner = merged * c.in_channels if ocr else c.intermediate_size
        self.mlp = GatedMLP(at, merged, inner, c.hidden_act)

    def run(self, pixels: Tensor, grids: Sequence[Sequence[int]]) -> Pieces[Tensor]:
        """pixels: [patches, values per patch] -> [tokens, hidden of the text model]. grids:
        (frames, rows, columns) of each image or video.
        """
        c = self.config
        coordinates = [grid_coordinates(grid, c.spatial_merge_size) for grid in grids]
        x = self.patch(pixels.to(self.dtype))
        if not self.ocr:
            pairs = zip(grids, coordinates, strict=True)
            learned = torch.cat([self._learned(*pair) for pair in pairs])
            x = self.patch_norm(x)
            x = x + learned.to(x.dtype)
        theta = float(str(c.rope_parameters.get("rope_theta", 10000.0)))
        turns = axial_turns(torch.cat(coordinates), c.hidden_size // c.num_heads, theta)
        turns, lengths = turns.to(self.device), lengths_of(grids)
        x = yield from through(self.blocks, x, lengths, turns)
        x = self.merge(self.norm(x).reshape(-1, self.merge.spec.inputs))
        out: Tensor = self.mlp(F.gelu(self.proj_norm(self.proj(x))))
        return out

    def _learned(self, grid: Sequence[int], coordinates: Tensor) -> Tensor:
        """[patches, hidden] fp32: learned positions, interpolated bicubically at the patches.

        coordinates: [patches, 2], row and column.
        """
        side = round(len(self.positions) ** 0.5)
        table = self.positions.float().T.reshape(1, -1, side, side)
        sizes = torch.tensor(grid[1:], dtype=torch.float32)
        spread = ((coordinates + 0.5) / sizes * 2 - 1).flip(-1).to(table.device)
        sampled = F.grid_sample(
            table, spread[None, :, None], "bicubic", padding_mode="border", align_corners=False
        )
        return sampled[0, :, :, 0].T
