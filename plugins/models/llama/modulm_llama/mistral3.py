"""Mistral Small 3.1 and later (2025): Pixtral's encoder, squares of its patches merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames
from modulm_layers import PlainMLP, size
from modulm_towers import (
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    PixtralTower,
    TowerConfig,
    cropped,
    flat_patches,
    patches,
    tiny_text,
)

__all__ = ["Mistral3Config", "Mistral3ForConditionalGeneration"]


@frozen(kw_only=True)
class _Keys:
    projector_hidden_act: str = "gelu"
    multimodal_projector_bias: bool = False
    spatial_merge_size: int = size(2)


@frozen(eq=False, kw_only=True)
class Mistral3Config(MultimodalConfig):
    """config.json of Mistral Small 3.1. layer: the tower layer whose states are used."""

    vision_type: ClassVar[type] = TowerConfig
    top_level_type: ClassVar[type | None] = _Keys

    layer: int = -1

    @classmethod
    def more(cls, keys: Mapping[str, Any], file: str) -> dict[str, Any]:
        layer = keys.get("vision_feature_layer", -1)
        if type(layer) is not int:
            raise CheckpointError(f"{file}: vision_feature_layer: not supported yet: {layer!r}")
        return {"layer": layer}


class _Projector(Module):
    def __init__(self, config: Mistral3Config, b: Builder) -> None:
        super().__init__()
        width, keys = config.vision.hidden_size, config.top_level
        self.merge = keys.spatial_merge_size
        self.norm = b.rms_norm("norm", width, config.text.text.rms_norm_eps)
        inputs = width * self.merge**2
        self.merging = b.linear("patch_merger.merging_layer", inputs, width, split=False)
        self.mlp = PlainMLP(
            b, width, config.hidden_size, keys.projector_hidden_act,
            bias=keys.multimodal_projector_bias, up="linear_1", down="linear_2",
            outputs=config.hidden_size,
        )  # fmt: skip

    def forward(self, x: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """x: [patches of all, width]; grids: (rows, columns) of each -> [tokens, hidden]."""
        parts = self.norm(x).split([rows * columns for rows, columns in grids])
        squares = [
            patches(part.T.reshape(1, -1, *grid), self.merge)[0]
            for part, grid in zip(parts, grids, strict=True)
        ]
        out: Tensor = self.mlp(self.merging(torch.cat(squares)))
        return out


class Mistral3ForConditionalGeneration(MultimodalModel):
    """Mistral Small 3.1 and later."""

    api = 1
    config_type: ClassVar[type] = Mistral3Config
    names = WeightNames(rewrite=(flat_patches(r"\.patch_conv\.weight$"),))

    def make_encoders(self, config: Mistral3Config, b: Builder) -> None:
        self.tower = PixtralTower(config.vision, b.at("vision_tower"))
        self.projector = _Projector(config, b.at("multi_modal_projector"))

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        pictures, patch = cropped(self, items), self.config.vision.patch_size
        grids = [(p.shape[1] // patch, p.shape[2] // patch) for p in pictures]
        (states,) = yield from self.tower.states(pictures, [self.config.layer])
        merged = self.config.top_level.spatial_merge_size
        counts = [rows // merged * (columns // merged) for rows, columns in grids]
        return list(self.projector(states, grids).split(counts))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "image_token_index": 480,
            "spatial_merge_size": 2,
            "text_config": tiny_text("mistral"),
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "head_dim": 16,
                "image_size": 56,
                "patch_size": 4,
            },
        }
