"""Keye-VL 1 and 1.5 (arXiv 2507.01949, 2509.01563): SigLIP for images of any size, before Qwen 3.

Videos are not supported yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from attrs import frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import PlainMLP, tiny_config
from modulm_towers import (
    MultimodalConfig,
    MultimodalModel,
    NavitConfig,
    NavitTower,
    Pieces,
    TextConfig,
    flat_patches,
    patch_squares,
)

__all__ = ["KeyeConfig", "KeyeForConditionalGeneration", "KeyeVL15ForConditionalGeneration"]

_EPS = 1e-5


@frozen(eq=False, kw_only=True)
class KeyeConfig(MultimodalConfig):
    """config.json of Keye-VL: Qwen 3's keys beside `vision_config`."""

    vision_type: ClassVar[type] = NavitConfig

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError."""
        vision = table.get("vision_config")
        if not isinstance(vision, Mapping):
            raise CheckpointError(f"{file}: vision_config: must be a table")
        text = {k: v for k, v in table.items() if k not in ("vision_config", "text_config")}
        text |= {**(table.get("text_config") or {}), "model_type": "qwen3"}
        return cls(
            text=TextConfig.from_table({**table, "text_config": text}, file, cls.text_ignored),
            vision=read_config(vision, cls.vision_type, file),
        )


class KeyeForConditionalGeneration(MultimodalModel):
    """Keye-VL 8B."""

    api = 1
    config_type: ClassVar[type] = KeyeConfig
    axes = 3
    names = WeightNames(
        rename=((r"^visual\.vision_model\.", "visual."), (r"^mlp_AR\.", "projector.")),
        ignore=(r"^visual\.(head\.|embeddings\.(position_ids|packing_position_embedding))",),
        rewrite=(flat_patches(r"\.patch_embedding\.weight$"),),
    )
    #: Whether squares of patches are normalized whole, instead of each patch.
    whole_squares: ClassVar[bool] = False

    def make_encoders(self, config: KeyeConfig, b: Builder) -> None:
        vision, at = config.vision, b.at("projector")
        self.tower = NavitTower(vision, b.at("visual"))
        inner = vision.hidden_size * vision.spatial_merge_size**2
        width = inner if self.whole_squares else vision.hidden_size
        self.norm = at.layer_norm("pre_norm", width, _EPS)
        self.projector = PlainMLP(
            at, inner, inner, "gelu", up="linear_1", down="linear_2", outputs=config.hidden_size
        )

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        merge = self.config.vision.spatial_merge_size
        pixels = torch.cat([self.tensor(item, "pixel_values").flatten(1) for item in items])
        grids = [item.tensors["image_grid_thw"].reshape(-1, 3).tolist() for item in items]
        flat = [grid for some in grids for grid in some]
        seen = yield from self.tower.run(pixels, flat)
        seen = seen if self.whole_squares else self.norm(seen)
        per_image = seen.split([t * h * w for t, h, w in flat])
        squares = torch.cat(
            [patch_squares(part, grid, merge) for part, grid in zip(per_image, flat, strict=True)]
        )
        tokens: Tensor = self.projector(self.norm(squares) if self.whole_squares else squares)
        return tokens.split([sum(t * h * w for t, h, w in some) // merge**2 for some in grids])

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
        return {
            **tiny_config("qwen3", "KeyeForConditionalGeneration", head_dim=16),
            "model_type": "Keye",
            "image_token_id": 480,
            "rope_parameters": rope,
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 4,
            },
        }


class KeyeVL15ForConditionalGeneration(KeyeForConditionalGeneration):
    """Keye-VL 1.5 8B."""

    whole_squares = True

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        names = {
            "architectures": ["KeyeVL1_5ForConditionalGeneration"],
            "model_type": "KeyeVL1_5",
        }
        return {**super().tiny(), **names}
