"""MiniCPM-V 4.6 (arXiv 2408.01800): SigLIP on slices of an image, with Qwen3.5 as text model.

Squares of patches are merged in the middle of the encoder and after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.media import MediaItem
from modulm.errors import UnsupportedError
from modulm.nn import Builder, Rewrite, WeightNames
from modulm_layers import PlainMLP, only, size
from modulm_towers import (
    BlockShape,
    ClipTower,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    TowerConfig,
    VisionAttention,
    flat_patches,
    tiny_text,
    windows,
)

__all__ = [
    "MiniCPMOcrForConditionalGeneration",
    "MiniCPMV46Config",
    "MiniCPMV46ForConditionalGeneration",
    "MiniCPMV47ForConditionalGeneration",
    "bucket_positions",
]

#: (rows, columns) of patches.
Grid = Sequence[int]
#: The side of squares that are merged, and the number of their patches.
_SIDE, _SQUARE = 2, 4


@frozen(kw_only=True)
class _SightConfig(TowerConfig):
    """`vision_config`. insert_layer_id: the layer after which squares are merged."""

    insert_layer_id: int = size(6, least=0)
    window_kernel_size: tuple[int, int] = (_SIDE, _SIDE)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(self, window_kernel_size=((_SIDE, _SIDE),))
        if self.insert_layer_id >= self.num_hidden_layers:
            raise ValueError(f"insert_layer_id: there is no layer {self.insert_layer_id}")


@frozen(kw_only=True)
class _Keys:
    """merger_times: number of merges after the encoder."""

    merge_kernel_size: tuple[int, int] = (_SIDE, _SIDE)
    merger_times: int = size(1)

    def __attrs_post_init__(self) -> None:
        only(self, merge_kernel_size=((_SIDE, _SIDE),), merger_times=(1,))


@frozen(eq=False, kw_only=True)
class MiniCPMV46Config(MultimodalConfig):
    """config.json of MiniCPM-V 4.6."""

    vision_type: ClassVar[type | None] = _SightConfig
    top_level_type: ClassVar[type | None] = _Keys


class _InnerMerger(Module):
    """Merges the patches of a square after attention within the square."""

    def __init__(self, c: TowerConfig, b: Builder) -> None:
        super().__init__()
        width, inner = c.hidden_size, c.intermediate_size
        shape = BlockShape(hidden=width, inner=inner, heads=c.num_attention_heads, act=c.hidden_act)
        self.attn_norm = b.layer_norm("layer_norm1", width, c.layer_norm_eps)
        self.attn = VisionAttention(b.at("self_attn"), shape)
        self.norm = b.layer_norm("pre_norm", _SQUARE * width, c.layer_norm_eps)
        self.mlp = PlainMLP(
            b, _SQUARE * width, _SQUARE * inner, "gelu_pytorch_tanh",
            up="linear_1", down="linear_2", outputs=width,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """x: [squares * 4, width], square by square -> [squares, width]."""
        x = x + self.attn(self.attn_norm(x), [_SQUARE] * (len(x) // _SQUARE), None)
        squares = x.unflatten(0, (-1, _SQUARE))
        out: Tensor = squares.mean(1) + self.mlp(self.norm(squares.flatten(1)))
        return out


class _Tower(ClipTower):
    """Images of any size, with positions bucketed by the patch's fraction of a side."""

    def __init__(self, c: _SightConfig, b: Builder) -> None:
        super().__init__(c, b)
        self.inserted = c.insert_layer_id
        self.inner = _InnerMerger(c, b.at("vit_merger"))

    def run(self, pixels: Tensor, grids: Sequence[Grid], merges: bool) -> Pieces[Tensor]:
        """pixels: [patches, values per patch] -> [remaining patches, hidden]. merges: whether
        squares are merged inside.
        """
        side = self.config.image_size // self.config.patch_size
        positions = torch.cat([bucket_positions(grid, side) for grid in grids]).to(pixels.device)
        x = self.patch(pixels.to(self.dtype)) + self.positions[positions]
        for index, layer in enumerate(self.layers):
            x = layer(x, [rows * columns for rows, columns in grids])
            yield len(x)
            if merges and index == self.inserted:
                x = self.inner(_by_squares(x, grids))
                grids = halved(grids)
        out: Tensor = self.post(x)
        return out


def halved(grids: Sequence[Grid]) -> list[Grid]:
    """The grids after merging squares."""
    return [(rows // _SIDE, columns // _SIDE) for rows, columns in grids]


def bucket_positions(grid: Grid, side: int) -> Tensor:
    """[patches] int64: index of each patch's position in a square of `side`, rounded down."""
    edges = torch.arange(1 / side, 1.0, 1 / side)
    rows, columns = (
        torch.bucketize(torch.arange(count) / count, edges, right=True) for count in grid
    )
    return (rows[:, None] * side + columns).flatten()


def _by_squares(x: Tensor, grids: Sequence[Grid]) -> Tensor:
    """Reorder x [patches, width] from rows of each grid to squares."""
    orders, first = [], 0
    for rows, columns in grids:
        order, _ = windows((1, rows, columns), 1, _SIDE)
        orders.append(order + first)
        first += rows * columns
    return x[torch.cat(orders).to(x.device)]


class MiniCPMV46ForConditionalGeneration(MultimodalModel):
    """MiniCPM-V 4.6."""

    api = 1
    config_type: ClassVar[type] = MiniCPMV46Config
    media = ("image", "video")
    names = WeightNames(
        rename=((r"^model\.merger\.", "merger."),),
        # The text model's query rewrites do not apply to the encoder.
        rewrite=(
            flat_patches(r"\.patch_embedding\.weight$"),
            Rewrite(r"^vision_tower\.", lambda name, tensor: [(name, tensor)]),
        ),
    )

    def make_encoders(self, config: MiniCPMV46Config, b: Builder) -> None:
        self.tower = _Tower(config.vision, b.at("vision_tower"))
        at, wide = b.at("merger.mlp.0"), _SQUARE * config.vision.hidden_size
        self.norm = at.layer_norm("pre_norm", wide, 1e-6)
        self.projector = PlainMLP(
            at, wide, wide, "gelu", up="linear_1", down="linear_2", outputs=config.hidden_size
        )

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        by_index: dict[int, Tensor] = {}
        for merges in (True, False):
            group = [i for i, item in enumerate(items) if self._merges(item) == merges]
            if group:
                group_features = yield from self._features([items[i] for i in group], merges)
                by_index |= zip(group, group_features, strict=True)
        return [by_index[i] for i in range(len(items))]

    def _features(self, items: Sequence[MediaItem], merges: bool) -> Pieces[Sequence[Tensor]]:
        pixels = torch.cat([self._patches(item) for item in items])
        each = [_grids(item) for item in items]
        grids = [grid for item_grids in each for grid in item_grids]
        x = yield from self.tower.run(pixels, grids, merges)
        left = halved(grids) if merges else grids
        squares = _by_squares(x, left).unflatten(0, (-1, _SQUARE)).flatten(1)
        tokens = self.projector(self.norm(squares))
        merged = _SQUARE**2 if merges else _SQUARE
        per_item: Sequence[Tensor] = tokens.split(
            [_count(item_grids) // merged for item_grids in each]
        )
        return per_item

    def _merges(self, item: MediaItem) -> bool:
        """Whether the processor's placeholder has a token per 16 patches, instead of per 4."""
        embedded = item.tensors.get("item_embedded")
        tokens = item.length if embedded is None else int(embedded.sum())
        patches = _count(_grids(item))
        if patches not in (tokens * _SQUARE, tokens * _SQUARE**2):
            raise UnsupportedError(f"{tokens} tokens for {patches} patches of an image")
        return patches == tokens * _SQUARE**2

    def _patches(self, item: MediaItem) -> Tensor:
        """[patches, values per patch] from [1, channels, side, patches * side]."""
        name = "pixel_values_videos" if item.kind == "video" else "pixel_values"
        side = self.config.vision.patch_size
        cut = self.tensor(item, name)[0].unflatten(2, (-1, side))
        return cut.permute(2, 0, 1, 3).flatten(1)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["MiniCPMV4_6ForConditionalGeneration"],
            "model_type": "minicpmv4_6",
            "image_token_id": 480,
            "video_token_id": 481,
            "insert_layer_id": 0,
            "tie_word_embeddings": False,
            "text_config": _tiny_text(),
            "vision_config": {
                "model_type": "minicpmv4_6_vision",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 4,
            },
        }


class MiniCPMOcrForConditionalGeneration(MiniCPMV46ForConditionalGeneration):
    """MiniCPM-OCR: MiniCPM-V 4.6 for documents, with a token per 4 patches."""

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        table = super().tiny()
        return {
            **table,
            "architectures": ["MiniCPMOcrForConditionalGeneration"],
            "model_type": "minicpm_ocr",
            "vision_config": {**table["vision_config"], "model_type": "minicpm_ocr_vision"},
        }


class MiniCPMV47ForConditionalGeneration(MiniCPMV46ForConditionalGeneration):
    """MiniCPM-V 4.7: slices and the image that they are cut from have places on one canvas."""

    axes = 3

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        table = super().tiny()
        return {
            **table,
            "architectures": ["MiniCPMV4_7ForConditionalGeneration"],
            "model_type": "minicpmv4_7",
            "image_start_id": 482,
            "image_end_id": 483,
            "slice_start_id": 484,
            "slice_end_id": 485,
            "newline_id": 201,
            "vision_config": {**table["vision_config"], "model_type": "minicpmv4_7_vision"},
        }


def _grids(item: MediaItem) -> list[Grid]:
    name = "target_sizes_videos" if item.kind == "video" else "target_sizes"
    grids: list[Grid] = item.tensors[name].reshape(-1, 2).tolist()
    return grids


def _count(grids: Sequence[Grid]) -> int:
    """The total number of patches."""
    return sum(rows * columns for rows, columns in grids)


def _tiny_text() -> dict[str, Any]:
    """A tiny Qwen3.5 with one layer of each kind."""
    return tiny_text(
        "qwen3_5_text",
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        rope_parameters={
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1], "mrope_interleaved": True,
        },
    )  # fmt: skip
