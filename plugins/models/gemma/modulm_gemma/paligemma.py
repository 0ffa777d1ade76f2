"""PaliGemma 1 and 2 (arXiv 2407.07726, 2412.03555): SigLIP before Gemma; bidirectional prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import Module

from modulm.contracts.media import MediaItem
from modulm.nn import Builder, WeightNames
from modulm_towers import (
    ClipTower,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    TowerConfig,
    flat_patches,
    stacked,
    tiny_text,
)

__all__ = ["PaliGemmaConfig", "PaliGemmaForConditionalGeneration"]


class PaliGemmaConfig(MultimodalConfig):
    """config.json of PaliGemma."""

    vision_type: ClassVar[type] = TowerConfig
    #: Applies to prompts with images, whose items declare it.
    text_ignored = ("use_bidirectional_attention",)


class PaliGemmaForConditionalGeneration(MultimodalModel):
    """PaliGemma; the text model is Gemma or Gemma 2."""

    api = 1
    config_type: ClassVar[type] = PaliGemmaConfig
    bidirectional = True
    names = WeightNames(
        rename=((r"^vision_tower\.vision_model\.", "vision_tower."),),
        ignore=(r"^vision_tower\.(head\.|embeddings\.position_ids)",),
        rewrite=(flat_patches(r"\.patch_embedding\.weight$"),),
    )
    tower: Module
    projector: Module

    def make_encoders(self, config: PaliGemmaConfig, b: Builder) -> None:
        width, hidden = config.vision.hidden_size, config.hidden_size
        self.tower = ClipTower(config.vision, b.at("vision_tower"))
        name = "multi_modal_projector.linear"
        self.projector = b.linear(name, width, hidden, bias=True, split=False)

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        pixels, counts = stacked(self, items, "pixel_values")
        states = yield from self.tower.run(pixels)
        tokens: Tensor = self.projector(states.flatten(0, 1))
        return tokens.split([count * states.shape[1] for count in counts])

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["PaliGemmaForConditionalGeneration"],
            "model_type": "paligemma",
            "image_token_index": 480,
            "projection_dim": 64,
            "hidden_size": 64,
            "text_config": tiny_text("gemma", head_dim=24),
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 7,
            },
        }
