"""The vision encoders of Qwen2-VL, 2.5 and 3 (arXiv 2409.12191, 2502.13923, 2511.21631)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn import Identity, Module, ModuleList

from modulm.nn import Builder
from modulm_layers import AttentionNames, activation, size
from modulm_towers import (
    Block,
    BlockNames,
    BlockShape,
    Pieces,
    Tower,
    axial_turns,
    grid_coordinates,
    interpolated,
    lengths_of,
    windows,
)

__all__ = ["QwenTower", "QwenTowerConfig"]

_EPS = 1e-6
_PROJECTIONS = AttentionNames("q", "k", "v", "proj", "qkv")


@frozen(kw_only=True)
class QwenTowerConfig:
    """`vision_config`. In Qwen2-VL `hidden_size` is that of the text model and `embed_dim` the
    encoder's; later ones have the text model's as `out_hidden_size`.
    """

    model_type: str = ""
    depth: int = size()
    hidden_size: int = size()
    embed_dim: int | None = size(None)
    out_hidden_size: int | None = size(None)
    intermediate_size: int | None = size(None)
    mlp_ratio: float = 4
    num_heads: int = size()
    num_key_value_heads: int = size(0, least=0)
    in_channels: int = size(3)
    patch_size: int = size(14)
    spatial_merge_size: int = size(2)
    temporal_patch_size: int = size(2)
    hidden_act: str = "quick_gelu"
    window_size: int | None = size(None)
    fullatt_block_indexes: tuple[int, ...] = ()
    num_position_embeddings: int = size(0, least=0)
    deepstack_visual_indexes: tuple[int, ...] = ()
    rope_parameters: dict[str, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.width % self.num_heads or (self.width // self.num_heads) % 4:
            raise ValueError(f"num_heads: {self.num_heads} heads of {self.width} cannot be rotated")
        wrong = [i for i in self.deepstack_visual_indexes if not 0 <= i < self.depth]
        if wrong:
            raise ValueError(f"deepstack_visual_indexes: there is no layer {wrong[0]}")

    @property
    def width(self) -> int:
        """The encoder's width."""
        return self.embed_dim or self.hidden_size

    @property
    def outputs(self) -> int:
        """The text model's width."""
        return self.out_hidden_size or self.hidden_size

    @property
    def inner(self) -> int:
        """The width of the feed-forward block."""
        return self.intermediate_size or int(self.width * self.mlp_ratio)

    @property
    def window(self) -> int:
        """Merged tokens along the side of a window, 0 for none."""
        return (self.window_size or 0) // self.spatial_merge_size // self.patch_size


class QwenTower(Tower):
    """The encoder of one generation; `kind` is "2", "2.5" or "3".

    merges: whether squares of patches become tokens of the text model.
    """

    def __init__(self, c: QwenTowerConfig, b: Builder, kind: str, *, merges: bool = True) -> None:
        super().__init__()
        self.config, self.dtype, self.device = c, b.shared.dtype, b.shared.device
        pixels = c.in_channels * c.temporal_patch_size * c.patch_size**2
        third, later = kind == "3", kind != "2"
        self.patch = b.linear("patch_embed.proj", pixels, c.width, bias=third, split=False)
        self.learned = third and c.num_position_embeddings > 0
        if self.learned:
            shape = (c.num_position_embeddings, c.width)
            b.parameter("pos_embed.weight", self, "positions", shape)
        gated = kind == "2.5"
        up, down = ("linear_fc1", "linear_fc2") if third else ("fc1", "fc2")
        up, down = ("up_proj", "down_proj") if gated else (up, down)
        shape_of = BlockShape(
            hidden=c.width, inner=c.inner, heads=c.num_heads, act=c.hidden_act, eps=_EPS,
            rms=gated, gated=gated, kv_heads=c.num_key_value_heads,
            names=BlockNames("norm1", "attn", _PROJECTIONS, "norm2", "mlp", up, down),
        )  # fmt: skip
        self.blocks = ModuleList(Block(b.at(f"blocks.{i}"), shape_of) for i in range(c.depth))
        merger = partial(_Merger, c, rms=gated)
        names = ("norm", "linear_fc1", "linear_fc2") if third else ("ln_q", "mlp.0", "mlp.2")
        self.merger = merger(b.at("merger"), names) if merges else Identity()
        deep = range(len(c.deepstack_visual_indexes)) if later else ()
        self.deep = ModuleList(
            merger(b.at(f"deepstack_merger_list.{i}"), names, wide=True) for i in deep
        )

    def run(self, pixels: Tensor, grids: Sequence[Sequence[int]]) -> Pieces[Tensor]:
        """pixels: [patches, values per patch] -> [tokens, hidden], or [patches, width] unmerged.

        grids: (frames, rows, columns) of each image or video. Inputs of deeper text layers, if any,
        are concatenated along the last axis.
        """
        c, merge = self.config, self.config.spatial_merge_size
        x = self.patch(pixels.to(self.dtype))
        coordinates = [grid_coordinates(grid, merge) for grid in grids]
        if self.learned:
            pairs = zip(grids, coordinates, strict=True)
            learned = [
                interpolated(self.positions, grid, image_coordinates)
                for grid, image_coordinates in pairs
            ]
            x = x + torch.cat(learned).to(x.dtype)
        theta = float(str(c.rope_parameters.get("rope_theta", 10000.0)))
        turns = axial_turns(torch.cat(coordinates), c.width // c.num_heads, theta).to(self.device)
        whole, lengths = lengths_of(grids), lengths_of(grids)
        order = None
        if c.window and c.fullatt_block_indexes:
            order, lengths = self._windows(grids)
            patches = (order[:, None] * merge**2 + torch.arange(merge**2)).flatten()
            x, turns = x[patches.to(self.device)], turns[patches.to(self.device)]
        deepstack: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            sees_all = order is None or index in c.fullatt_block_indexes
            x = block(x, whole if sees_all else lengths, turns)
            if index in c.deepstack_visual_indexes and len(self.deep):
                deepstack.append(self.deep[c.deepstack_visual_indexes.index(index)](x))
            yield len(x)
        out: Tensor = self.merger(x)
        if order is not None:
            out = out[order.argsort().to(self.device)]
        return torch.cat([out, *deepstack], dim=-1) if deepstack else out

    def _windows(self, grids: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
        """The order of the merged tokens by window, and the number of patches in each window."""
        c, first = self.config, 0
        orders: list[Tensor] = []
        lengths: list[int] = []
        for grid in grids:
            order, counts = windows(grid, c.spatial_merge_size, c.window)
            orders.append(order + first)
            lengths += [count * c.spatial_merge_size**2 for count in counts]
            first += len(order)
        return torch.cat(orders), lengths


class _Merger(Module):
    """Merges squares of patches into tokens of the text model. `wide`: the norm spans a square."""

    def __init__(
        self,
        c: QwenTowerConfig,
        b: Builder,
        names: tuple[str, str, str],
        *,
        rms: bool,
        wide: bool = False,
    ) -> None:
        super().__init__()
        norm, up, down = names
        self.inner, self.wide = c.width * c.spatial_merge_size**2, wide
        make = b.rms_norm if rms else b.layer_norm
        self.norm = make(norm, self.inner if wide else c.width, _EPS)
        self.up = b.linear(up, self.inner, self.inner, bias=True)
        self.act = activation("gelu", b.ops)
        self.down = b.row_linear(down, self.inner, c.outputs, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """x: [patches, width] -> [tokens, outputs]."""
        x = x.reshape(-1, self.inner) if self.wide else x
        out: Tensor = self.down(self.act(self.up(self.norm(x).reshape(-1, self.inner))))
        return out
