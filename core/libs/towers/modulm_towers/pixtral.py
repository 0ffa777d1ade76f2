"""Pixtral's encoder (arXiv 2410.07073): images of any size, rotary positions of row and column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm_layers import AttentionNames
from modulm_towers.blocks import Block, BlockNames, BlockShape, patches
from modulm_towers.clip import TowerConfig
from modulm_towers.grid import grid_coordinates
from modulm_towers.pieces import Pieces

if TYPE_CHECKING:
    from modulm.nn import Builder

__all__ = ["PixtralTower"]

_EPS = 1e-5
_NAMES = BlockNames(
    "attention_norm",
    "attention",
    AttentionNames("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"),
    "ffn_norm",
    "feed_forward",
    "up_proj",
    "down_proj",
)


class PixtralTower(Module):
    """The patches of all images are concatenated."""

    def __init__(self, c: TowerConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype = c, b.shared.dtype
        self.size = c.head_dim or c.hidden_size // c.num_attention_heads
        pixels = c.num_channels * c.patch_size**2
        self.patch = b.linear("patch_conv", pixels, c.hidden_size, split=False)
        self.norm = b.rms_norm("ln_pre", c.hidden_size, _EPS)
        shape = BlockShape(
            hidden=c.hidden_size, inner=c.intermediate_size, heads=c.num_attention_heads,
            act=c.hidden_act, eps=_EPS, head_dim=self.size, rms=True, gated=True, bias=False,
            out_bias=False, mlp_bias=False, names=_NAMES,
        )  # fmt: skip
        at, count = b.at("transformer"), c.num_hidden_layers
        self.layers = ModuleList(Block(at.at(f"layers.{i}"), shape) for i in range(count))

    def states(self, images: Sequence[Tensor], layers: Sequence[int]) -> Pieces[list[Tensor]]:
        """Hidden states [patches of all images, hidden] after the given numbers of layers.

        images: [channels, height, width] each. Negative layer numbers count from the last.
        """
        size, count = self.config.patch_size, len(self.layers)
        depths = [index % (count + 1) for index in layers]
        cut = torch.cat([patches(image[None].to(self.dtype), size)[0] for image in images])
        grids = [(1, image.shape[1] // size, image.shape[2] // size) for image in images]
        lengths = [rows * columns for _, rows, columns in grids]
        turns = self._turns(torch.cat([grid_coordinates(grid, 1) for grid in grids])).to(cut.device)
        x = self.norm(self.patch(cut))
        states_by_depth = {0: x}
        for index, layer in enumerate(self.layers[: max(depths)]):
            x = states_by_depth[index + 1] = layer(x, lengths, turns)
            yield len(x)
        return [states_by_depth[index] for index in depths]

    def _turns(self, coordinates: Tensor) -> Tensor:
        """[patches, head_dim]: even angles follow rows, odd angles columns."""
        steps = torch.arange(0, self.size, 2, dtype=torch.float32) / self.size
        waves = 1.0 / self.config.theta**steps
        angles = torch.cat(
            [coordinates[:, :1].float() * waves[0::2], coordinates[:, 1:].float() * waves[1::2]],
            dim=1,
        )
        return torch.cat([angles.cos(), angles.sin()], dim=-1)
