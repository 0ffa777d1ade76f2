"""SigLIP for images of any size (NaViT, arXiv 2307.06304), of Keye-VL and PaddleOCR-VL.

Learned positions are interpolated, and heads are rotated by rows and columns. Squares of patches
are normalized and projected to the tokens of a text model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from attrs import field, frozen
from torch import Tensor
from torch.nn import ModuleList

from modulm.contracts.media import MediaItem
from modulm.nn import Builder, WeightNames
from modulm_layers import PlainMLP, size
from modulm_towers.blocks import Block, BlockShape, patches
from modulm_towers.grid import axial_turns, grid_coordinates, lengths_of
from modulm_towers.multimodal import MultimodalModel, flat_patches
from modulm_towers.pieces import Pieces, Tower, through

__all__ = ["NavitConfig", "NavitModel", "NavitTower"]

Grids = Sequence[Sequence[int]]
_PROJECTOR_EPS = 1e-5


@frozen(kw_only=True)
class NavitConfig:
    """`vision_config`."""

    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    num_channels: int = size(3)
    image_size: int = size(384)
    patch_size: int = size(14)
    spatial_merge_size: int = size(2)
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads or self.head_dim % 4:
            raise ValueError(
                f"num_attention_heads: {self.num_attention_heads} heads of {self.hidden_size} "
                "cannot be rotated"
            )
        if self.patch_size > self.image_size:
            raise ValueError("patch_size: larger than image_size")

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def side(self) -> int:
        """The side of the square of learned positions."""
        return self.image_size // self.patch_size


class NavitTower(Tower):
    """Encodes the concatenated patches of all images, row by row."""

    positions: Tensor

    def __init__(self, c: NavitConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype, at = c, b.shared.dtype, b.at("embeddings")
        pixels = c.num_channels * c.patch_size**2
        self.patch = at.linear("patch_embedding", pixels, c.hidden_size, bias=True, split=False)
        shape = (c.side**2, c.hidden_size)
        at.parameter("position_embedding.weight", self, "positions", shape)
        block = BlockShape(
            hidden=c.hidden_size, inner=c.intermediate_size, heads=c.num_attention_heads,
            act=c.hidden_act, eps=c.layer_norm_eps,
        )  # fmt: skip
        count = c.num_hidden_layers
        self.layers = ModuleList(Block(b.at(f"encoder.layers.{i}"), block) for i in range(count))
        self.post = b.layer_norm("post_layernorm", c.hidden_size, c.layer_norm_eps)

    def run(self, pixels: Tensor, grids: Grids) -> Pieces[Tensor]:
        """pixels: [patches, values per patch] -> [patches, hidden]. grids: (frames, rows, columns)
        of patches of each image.
        """
        c = self.config
        x = self.patch(pixels.to(self.dtype))
        x = x + torch.cat([self._positions(grid) for grid in grids]).to(x.dtype)
        theta = float(c.rope_parameters.get("rope_theta", 10000.0))
        coordinates = torch.cat([grid_coordinates(grid, 1) for grid in grids])
        turns = axial_turns(coordinates, c.head_dim, theta).to(x.device)
        x = yield from through(self.layers, x, lengths_of(grids), turns)
        out: Tensor = self.post(x)
        return out

    def _positions(self, grid: Sequence[int]) -> Tensor:
        """[patches, hidden]: learned positions, interpolated bilinearly to the grid."""
        frames, rows, columns = grid
        square = self.positions.float().view(1, self.config.side, self.config.side, -1)
        resized = F.interpolate(square.permute(0, 3, 1, 2), (rows, columns), mode="bilinear")
        return resized[0].flatten(1).T.repeat(frames, 1)


class NavitModel(MultimodalModel):
    """A text model with positions on three axes behind the encoder and its projector."""

    axes = 3
    names = WeightNames(
        rename=((r"^visual\.vision_model\.", "visual."), (r"^mlp_AR\.", "projector.")),
        ignore=(r"^visual\.(head\.|embeddings\.(position_ids|packing_position_embedding))",),
        rewrite=(flat_patches(r"\.patch_embedding\.weight$"),),
    )
    #: Whether squares of patches are normalized whole, instead of each patch.
    whole_squares: ClassVar[bool] = False

    def make_encoders(self, config: Any, b: Builder) -> None:
        vision, at = config.vision, b.at("projector")
        self.tower = NavitTower(vision, b.at("visual"))
        inner = vision.hidden_size * vision.spatial_merge_size**2
        width = inner if self.whole_squares else vision.hidden_size
        self.norm = at.layer_norm("pre_norm", width, _PROJECTOR_EPS)
        self.projector = PlainMLP(
            at, inner, inner, "gelu", up="linear_1", down="linear_2", outputs=config.hidden_size
        )

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        merge = self.config.vision.spatial_merge_size
        pixels = torch.cat([self.tensor(item, "pixel_values").flatten(1) for item in items])
        grids = [item.tensors["image_grid_thw"].reshape(-1, 3).tolist() for item in items]
        flat = [grid for item_grids in grids for grid in item_grids]
        hidden = yield from self.tower.run(pixels, flat)
        hidden = hidden if self.whole_squares else self.norm(hidden)
        per_image = hidden.split([t * h * w for t, h, w in flat])
        squares = torch.cat(
            [_patch_squares(part, grid, merge) for part, grid in zip(per_image, flat, strict=True)]
        )
        tokens: Tensor = self.projector(self.norm(squares) if self.whole_squares else squares)
        counts = [sum(t * h * w for t, h, w in item_grids) // merge**2 for item_grids in grids]
        per_item: Sequence[Tensor] = tokens.split(counts)  # type: ignore[no-untyped-call]
        return per_item


def _patch_squares(x: Tensor, grid: Sequence[int], merge: int) -> Tensor:
    """[patches, hidden], row by row -> [tokens, merge * merge * hidden]."""
    frames, rows, columns = grid
    cut = patches(x.view(frames, rows, columns, -1).permute(0, 3, 1, 2), merge)
    squares: Tensor = cut.reshape(*cut.shape[:2], x.shape[1], -1).transpose(2, 3)
    return squares.flatten(2).flatten(0, 1)
