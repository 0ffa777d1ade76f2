"""SigLIP 2 with native aspect ratios (NaFlex, arXiv 2502.14786)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.nn import Builder
from modulm_siglip.clip import TextTower
from modulm_siglip.siglip import Pool, SiglipConfig, SiglipModel
from modulm_towers import NaflexTower, Siglip2VisionConfig, whole

__all__ = ["NaflexConfig", "NaflexTower", "Siglip2Model", "Siglip2VisionConfig"]


class NaflexConfig(SiglipConfig):
    """config.json of SigLIP 2 for images of any size."""

    vision_type: ClassVar[type] = Siglip2VisionConfig


class Siglip2Model(SiglipModel):
    """SigLIP 2 with images in their native aspect ratio."""

    config_type: ClassVar[type] = NaflexConfig

    def make(self, config: Any, b: Builder) -> None:
        self.text = TextTower(config.text, b.at("text_model"), causal=False)
        self.tower = NaflexTower(config.vision, b.at("vision_model"))
        self.pool = Pool(config.vision, b.at("vision_model.head"))
        inputs, width = config.text.hidden_size, config.hidden_size
        self.text_out = b.linear("text_model.head", inputs, width, bias=True, split=False)

    def encode(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        grids = [item.tensors["spatial_shapes"].reshape(-1).tolist() for item in items]
        pixels = [torch.from_numpy(np.array(item.tensors["pixel_values"])) for item in items]
        lengths = [len(image) for image in pixels]
        states = whole(self.tower.run(torch.cat(pixels).to(self.device, self.dtype), grids))
        pooled: Tensor = self.pool(states, lengths)
        return list(pooled.split(1))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        like = super().tiny()
        text = {**like["text_config"], "model_type": "siglip2_text_model"}
        vision = {**like["vision_config"], "model_type": "siglip2_vision_model"}
        del vision["image_size"]
        return {
            "architectures": ["Siglip2Model"],
            "model_type": "siglip2",
            "text_config": text,
            "vision_config": {**vision, "num_patches": 16, "patch_size": 16},
        }
