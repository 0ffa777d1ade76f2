"""Command A Vision (Cohere, 2025): as Aya Vision, without a norm before its projector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen
from torch import Tensor

from modulm.nn import Builder
from modulm_cohere.aya_vision import AyaVisionForConditionalGeneration, GatedProjector
from modulm_layers import size
from modulm_towers import ClipTower, MultimodalConfig, Pieces, TowerConfig, tiny_text

__all__ = ["Cohere2VisionForConditionalGeneration", "CommandAVisionConfig"]


@frozen(kw_only=True)
class _Keys:
    downsample_factor: int = size(2)
    alignment_intermediate_size: int = size(36864)


class CommandAVisionConfig(MultimodalConfig):
    """config.json of Command A Vision."""

    vision_type: ClassVar[type] = TowerConfig
    top_level_type: ClassVar[type | None] = _Keys


class Cohere2VisionForConditionalGeneration(AyaVisionForConditionalGeneration):
    """Command A Vision; the text model is Command A."""

    config_type: ClassVar[type] = CommandAVisionConfig

    def make_encoders(self, config: Any, b: Builder) -> None:
        self.tower = ClipTower(config.vision, b.at("vision_tower"))
        self.projector = GatedProjector(config, b.at("multi_modal_projector"), normed=False)

    def states_of(self, pixels: Tensor) -> Pieces[Tensor]:
        return self.tower.run(pixels)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            **{key: value for key, value in super().tiny().items() if key != "image_token_index"},
            "architectures": ["Cohere2VisionForConditionalGeneration"],
            "model_type": "cohere2_vision",
            "image_token_id": 480,
            "text_config": tiny_text("cohere2", sliding_window=64, head_dim=16, logit_scale=1.0),
        }
