"""PaddleOCR-VL (arXiv 2510.14528): a NaViT encoder for images of any size before a small ERNIE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames
from modulm_layers import PlainMLP
from modulm_towers import (
    MultimodalConfig,
    MultimodalModel,
    NavitConfig,
    NavitTower,
    Pieces,
    flat_patches,
    patch_squares,
    tiny_text,
)

__all__ = ["PaddleOCRVLConfig", "PaddleOCRVLForConditionalGeneration"]

_EPS = 1e-5


@frozen(eq=False, kw_only=True)
class PaddleOCRVLConfig(MultimodalConfig):
    """config.json of PaddleOCR-VL."""

    vision_type: ClassVar[type] = NavitConfig

    @classmethod
    def more(cls, keys: Mapping[str, Any], file: str) -> dict[str, Any]:
        if keys["text_config"].get("use_bias"):
            raise CheckpointError(f"{file}: use_bias: not supported yet: true")
        return {}


class PaddleOCRVLForConditionalGeneration(MultimodalModel):
    """PaddleOCR-VL; its text model is Llama's block with positions on three axes."""

    api = 1
    config_type: ClassVar[type] = PaddleOCRVLConfig
    axes = 3
    names = WeightNames(
        rename=((r"^visual\.vision_model\.", "visual."), (r"^mlp_AR\.", "projector.")),
        ignore=(r"^visual\.(head\.|embeddings\.(position_ids|packing_position_embedding))",),
        rewrite=(flat_patches(r"\.patch_embedding\.weight$"),),
    )

    def make_encoders(self, config: PaddleOCRVLConfig, b: Builder) -> None:
        vision, at = config.vision, b.at("projector")
        self.tower = NavitTower(vision, b.at("visual"))
        self.norm = at.layer_norm("pre_norm", vision.hidden_size, _EPS)
        inner = vision.hidden_size * vision.spatial_merge_size**2
        self.projector = PlainMLP(
            at, inner, inner, "gelu", up="linear_1", down="linear_2", outputs=config.hidden_size
        )

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        merge = self.config.vision.spatial_merge_size
        pixels = torch.cat([self.tensor(item, "pixel_values").flatten(1) for item in items])
        grids = [item.tensors["image_grid_thw"].reshape(-1, 3).tolist() for item in items]
        flat = [grid for some in grids for grid in some]
        seen = yield from self.tower.run(pixels, flat)
        per_image = self.norm(seen).split([t * h * w for t, h, w in flat])
        squares = [
            patch_squares(part, grid, merge) for part, grid in zip(per_image, flat, strict=True)
        ]
        tokens: Tensor = self.projector(torch.cat(squares))
        return tokens.split([sum(t * h * w for t, h, w in some) // merge**2 for some in grids])

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
        return {
            "architectures": ["PaddleOCRVLForConditionalGeneration"],
            "model_type": "paddleocr_vl",
            "image_token_id": 480,
            "tie_word_embeddings": False,
            "text_config": tiny_text("paddleocr_vl_text", head_dim=16, rope_parameters=rope),
            "vision_config": {
                "model_type": "paddleocr_vl_vision",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 4,
            },
        }
