"""MoonViT (arXiv 2504.07491): images of any size, and short clips whose frames are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from attrs import field, frozen
from torch import Tensor
from torch.nn import ModuleList

from modulm_layers import AttentionNames, only, size
from modulm_towers.blocks import Block, BlockNames, BlockShape
from modulm_towers.grid import grid_coordinates
from modulm_towers.pieces import Pieces, Tower, through

if TYPE_CHECKING:
    from modulm.nn import Builder

__all__ = ["MoonVit", "MoonVitConfig"]

_EPS = 1e-5
_NAMES = BlockNames(
    "norm1", "attn", AttentionNames("q_proj", "k_proj", "v_proj", "proj", "qkv"), "norm2",
)  # fmt: skip


@frozen(kw_only=True)
class MoonVitConfig:
    """`vision_config`. pos_emb_height, pos_emb_width: size of the learned position grid."""

    hidden_size: int = size(1152)
    intermediate_size: int = size(4304)
    num_hidden_layers: int = size(27)
    num_attention_heads: int = size(16)
    patch_size: int = size(14)
    pos_emb_height: int = size(64)
    pos_emb_width: int = size(64)
    merge_kernel_size: tuple[int, int] = (2, 2)
    hidden_act: str = "gelu_pytorch_tanh"
    rope_parameters: dict[str, Any] = field(factory=dict)
    pos_emb_type: str = "divided_fixed"
    video_attn_type: str = "spatial_temporal"
    merge_type: str = "sd2_tpool"

    def __attrs_post_init__(self) -> None:
        heads, hidden = self.num_attention_heads, self.hidden_size
        if hidden % heads or (hidden // heads) % 4:
            raise ValueError(f"num_attention_heads: {heads} heads of {hidden} cannot be rotated")
        if min(self.merge_kernel_size) < 1:
            raise ValueError(f"merge_kernel_size: {self.merge_kernel_size}")
        only(
            self, pos_emb_type=("divided_fixed",), video_attn_type=("spatial_temporal",),
            merge_type=("sd2_tpool",),
        )  # fmt: skip

    @property
    def merged(self) -> int:
        """Patches per token."""
        return self.merge_kernel_size[0] * self.merge_kernel_size[1]


class MoonVit(Tower):
    """Patches of all images are concatenated row by row; those of a clip attend to each other."""

    positions: Tensor

    def __init__(self, c: MoonVitConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype, self.device = c, b.shared.dtype, b.shared.device
        hidden, at = c.hidden_size, b.at("patch_embed")
        self.patch = at.linear("proj", 3 * c.patch_size**2, hidden, bias=True, split=False)
        learned = (c.pos_emb_height, c.pos_emb_width, hidden)
        at.parameter("pos_emb.weight", self, "positions", learned)
        shape = BlockShape(
            hidden=hidden, inner=c.intermediate_size, heads=c.num_attention_heads,
            act=c.hidden_act, eps=_EPS, names=_NAMES,
        )  # fmt: skip
        layers = range(c.num_hidden_layers)
        self.layers = ModuleList(Block(b.at(f"layers.{i}"), shape) for i in layers)
        self.norm = b.layer_norm("final_layernorm", hidden, _EPS)

    def run(self, pixels: Tensor, grids: Sequence[Sequence[int]]) -> Pieces[Tensor]:
        """pixels: [patches, values per patch] -> [tokens, patches per token, hidden].

        grids: (frames, rows, columns) of each image or clip. The frames of a clip are averaged.
        """
        learned = torch.cat([self._learned(grid) for grid in grids])
        x = self.patch(pixels.to(self.dtype)) + learned.to(self.dtype)
        turns = self._turns(torch.cat([grid_coordinates(grid, 1) for grid in grids])).to(
            self.device
        )
        lengths = [frames * rows * columns for frames, rows, columns in grids]
        x = self.norm((yield from through(self.layers, x, lengths, turns)))
        pairs = zip(x.split(lengths), grids, strict=True)
        return torch.cat([self._merged(patches, grid) for patches, grid in pairs])

    def _learned(self, grid: Sequence[int]) -> Tensor:
        """[patches, hidden] fp32: the learned positions, resized to the grid, plus sinusoidal
        positions of a clip's frames.
        """
        frames, *sides = grid
        table = self.positions.float().permute(2, 0, 1)[None]
        if list(table.shape[2:]) != sides:
            table = F.interpolate(table, size=sides, mode="bicubic")
        positions = table[0].flatten(1).T
        if frames == 1:
            return positions
        return (positions + _counted(frames, positions.shape[1], self.device)[:, None]).flatten(
            0, 1
        )

    def _turns(self, coordinates: Tensor) -> Tensor:
        """[patches, head_dim]: pairs of angles of equal frequency for column and row."""
        size = self.config.hidden_size // self.config.num_attention_heads
        theta = float(str(self.config.rope_parameters.get("rope_theta", 10000.0)))
        waves = 1.0 / theta ** (torch.arange(0, size, 4, dtype=torch.float32) / size)
        angles = (coordinates.flip(-1)[:, None].float() * waves[:, None]).flatten(1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    def _merged(self, x: Tensor, grid: Sequence[int]) -> Tensor:
        """x: [patches, hidden] of one clip -> [tokens, patches per token, hidden]."""
        frames, rows, columns = grid
        high, wide = self.config.merge_kernel_size
        x = x.view(frames, rows // high, high, columns // wide, wide, -1).mean(0)
        return x.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _counted(frames: int, hidden: int, device: torch.device) -> Tensor:
    """[frames, hidden] fp32: sines, then cosines, of each frame's index."""
    steps = torch.arange(0, hidden, 2, dtype=torch.float32, device=device) / hidden
    angles = torch.arange(frames, device=device)[:, None] / 10000**steps
    return torch.cat([angles.sin(), angles.cos()], dim=1)
