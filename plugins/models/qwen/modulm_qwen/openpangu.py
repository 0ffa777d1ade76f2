"""openPangu VL 7B (Huawei): states of two layers of an encoder like Qwen2.5-VL's, and Embedded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import AttentionNames, PlainMLP, size
from modulm_qwen.vision import QwenTower, QwenTowerConfig
from modulm_towers import (
    Block,
    BlockNames,
    BlockShape,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    TextConfig,
    axial_turns,
    flat_patches,
    grid_coordinates,
    lengths_of,
    tiny_text,
)

__all__ = ["OpenPanguVLConfig", "OpenPanguVLForConditionalGeneration"]

_PROJECTIONS = AttentionNames("q", "k", "v", "proj", "qkv")
_NAMES = BlockNames("norm1", "attn", _PROJECTIONS, "norm2", "mlp", "up_proj", "down_proj")


@frozen(kw_only=True)
class _VisionConfig(QwenTowerConfig):
    """`vision_config`. mm_unit_vision_select_layer: the layers whose states are used, from the
    last.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {"in_chans": "in_channels"}

    depth: int = size(26)
    num_heads: int = size(16)
    hidden_size: int = size(1536)
    hidden_act: str = "gelu"
    intermediate_size: int | None = size(4608)
    out_hidden_size: int | None = size(3584)
    window_size: int | None = size(112)
    fullatt_block_indexes: tuple[int, ...] = (5, 12, 19, 25)
    mm_unit_vision_select_layer: tuple[int, ...] = (-1, -3)
    rms_norm_eps: float = 1e-6

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.hidden_act == "silu":
            raise ValueError("hidden_act: silu: not supported: its files have other matrices")
        layers = self.mm_unit_vision_select_layer
        if not layers or any(not -self.depth <= layer < 0 for layer in layers):
            raise ValueError(f"mm_unit_vision_select_layer: {layers} of {self.depth} layers")


def _axes(sections: Sequence[int]) -> tuple[int, ...]:
    """The axis of each angle: each next one is of the axis that is behind most, but no axis twice
    in a row while another is left; the last angle is of the first axis.
    """
    most = [sections[0] - 1, *sections[1:]]
    placed = [0] * len(most)
    axes: list[int] = []
    for _ in range(sum(most)):
        left = [axis for axis in range(len(most)) if placed[axis] < most[axis]]
        others = [axis for axis in left if not axes or axis != axes[-1]]
        axis = min(others or left, key=lambda axis: (placed[axis] / most[axis], axis))
        placed[axis] += 1
        axes.append(axis)
    return (*axes, 0)


@frozen(eq=False, kw_only=True)
class OpenPanguVLConfig(MultimodalConfig):
    """config.json of openPangu VL: the text model's keys at the top, or in `text_config`.

    sections: angles of each axis.
    """

    vision_type: ClassVar[type] = _VisionConfig

    sections: tuple[int, ...]

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        vision = table.get("vision_config")
        if not isinstance(vision, Mapping):
            raise CheckpointError(f"{file}: vision_config: must be a table")
        inner = table.get("text_config")
        text = dict(inner if isinstance(inner, Mapping) else table)
        rope = dict(text.get("rope_scaling") or text.get("rope_parameters") or {})
        sections = rope.get("mrope_section")
        if (
            not rope.get("mrope_interleaved")
            or not isinstance(sections, list)
            or len(sections) != 3
            or not all(type(count) is int and count > 0 for count in sections)
        ):
            raise CheckpointError(f"{file}: rope_scaling: mrope_section must be three numbers")
        if "rope_theta" in text:
            rope.setdefault("rope_theta", text["rope_theta"])
        dropped = ("rope_scaling", "vision_config", "text_config")
        text = {key: value for key, value in text.items() if key not in dropped}
        text |= {"model_type": "PanguEmbedded", "rope_parameters": {**rope, "rope_type": "default"}}
        return cls(
            text=TextConfig.from_table({**table, "text_config": text}, file),
            vision=read_config(vision, _VisionConfig, file),
            sections=tuple(sections),
        )


class _Merger(Module):
    """Makes a square of patches a token."""

    def __init__(self, c: _VisionConfig, b: Builder) -> None:
        super().__init__()
        self.inner = c.width * c.spatial_merge_size**2
        self.norm = b.rms_norm("ln_q", c.width, 1e-6)
        self.mlp = PlainMLP(
            b, self.inner, self.inner, "gelu", bias=True, up="mlp.0", down="mlp.2",
            outputs=c.outputs,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """[patches, width] -> [tokens, outputs]."""
        merged: Tensor = self.mlp(self.norm(x).reshape(-1, self.inner))
        return merged


class _PanguTower(QwenTower):
    """Layers with windows; the normed states of several are merged and added."""

    def __init__(self, c: _VisionConfig, b: Builder) -> None:
        Module.__init__(self)
        self.config, self.dtype, self.device = c, b.shared.dtype, b.shared.device
        pixels = c.in_channels * c.temporal_patch_size * c.patch_size**2
        self.patch = b.linear("patch_embed.proj", pixels, c.width, bias=False, split=False)
        shape = BlockShape(
            hidden=c.width, inner=c.inner, heads=c.num_heads, act=c.hidden_act, eps=c.rms_norm_eps,
            rms=True, names=_NAMES,
        )  # fmt: skip
        self.blocks = ModuleList(Block(b.at(f"blocks.{i}"), shape) for i in range(c.depth))
        self.last = b.rms_norm("final_layernorm", c.width, c.rms_norm_eps)
        #: Numbers of the layers, from the last, as the mergers are ordered.
        self.taken = sorted((c.depth + i for i in c.mm_unit_vision_select_layer), reverse=True)
        self.mergers = ModuleList(_Merger(c, b.at(f"merger.{i}")) for i in range(len(self.taken)))

    def run(self, pixels: Tensor, grids: Sequence[Sequence[int]]) -> Pieces[Tensor]:
        """pixels: [patches, values per patch] -> [tokens, outputs]."""
        c, merge = self.config, self.config.spatial_merge_size
        x = self.patch(pixels.to(self.dtype))
        coordinates = torch.cat([grid_coordinates(grid, merge) for grid in grids])
        turns = axial_turns(coordinates, c.width // c.num_heads).to(self.device)
        order, parts = self._windows(grids)
        patches = (order[:, None] * merge**2 + torch.arange(merge**2)).flatten().to(self.device)
        x, turns, whole = x[patches], turns[patches], lengths_of(grids)
        states: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            x = block(x, whole if index in c.fullatt_block_indexes else parts, turns)
            if index in self.taken:
                states[index] = self.last(x)
            yield len(x)
        tokens = [
            merger(states[index]) for index, merger in zip(self.taken, self.mergers, strict=True)
        ]
        return torch.stack(tokens).sum(0)[order.argsort().to(self.device)]


class OpenPanguVLForConditionalGeneration(MultimodalModel):
    """openPangu VL, of images."""

    api = 1
    config_type: ClassVar[type] = OpenPanguVLConfig
    axes = 3
    names = WeightNames(rewrite=(flat_patches(r"patch_embed\.proj\.weight$"),))

    def make_encoders(self, config: OpenPanguVLConfig, b: Builder) -> None:
        at, vision = b.at("visual"), config.vision
        self.tower = _PanguTower(vision, at)
        name = "vision_projection.fc1"
        self.projector = at.linear(name, vision.outputs, config.hidden_size, bias=True, split=False)
        axes = _axes(config.sections)
        for layer in getattr(self.text, "layers", ()):
            # Layers share the table; its axes are not those of Qwen.
            table = layer.attn.rotation
            table.rope = evolve(table.rope, axes=axes)

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        grids = [item.tensors["image_grid_thw"].reshape(-1).tolist() for item in items]
        pixels = torch.cat([self.tensor(item, "pixel_values") for item in items])
        tokens = yield from self.tower.run(pixels, grids)
        tokens = self.projector(torch.nn.functional.silu(tokens))
        square = self.config.vision.spatial_merge_size**2
        return tokens.split([t * rows * columns // square for t, rows, columns in grids])

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        rope = {"rope_type": "default", "mrope_section": [3, 3, 2], "mrope_interleaved": True}
        return {
            **tiny_text("openpangu_vl", rope_scaling=rope, rope_theta=10000.0),
            "architectures": ["OpenPanguVLForConditionalGeneration"],
            "model_type": "openpangu_vl",
            "image_token_id": 480,
            "bias": True,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "vision_config": {
                "depth": 3,
                "hidden_size": 32,
                "out_hidden_size": 48,
                "intermediate_size": 48,
                "num_heads": 2,
                "patch_size": 4,
                "window_size": 16,
                "fullatt_block_indexes": [1],
                "mm_unit_vision_select_layer": [-1, -3],
            },
        }
