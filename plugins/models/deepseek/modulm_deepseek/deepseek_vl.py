"""DeepSeek-VL (arXiv 2403.05525): SigLIP's patches, projected by two linear layers, and Llama."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import Module

from modulm.contracts.media import MediaItem
from modulm.nn import Builder, WeightNames
from modulm_layers import PlainMLP
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

__all__ = ["DeepseekVLConfig", "DeepseekVLForConditionalGeneration"]


class DeepseekVLConfig(MultimodalConfig):
    """config.json of DeepSeek-VL."""

    vision_type: ClassVar[type] = TowerConfig


class DeepseekVLForConditionalGeneration(MultimodalModel):
    """DeepSeek-VL; the text model is Llama."""

    api = 1
    config_type: ClassVar[type] = DeepseekVLConfig
    names = WeightNames(
        rename=((r"^vision_model\.vision_model\.", "vision_model."),),
        ignore=(r"^vision_model\.(head\.|embeddings\.position_ids)",),
        rewrite=(flat_patches(r"\.patch_embedding\.weight$"),),
    )
    tower: Module
    projector: Module

    def make_encoders(self, config: DeepseekVLConfig, b: Builder) -> None:
        hidden = config.hidden_size
        self.tower = ClipTower(config.vision, b.at("vision_model"))
        self.projector = PlainMLP(
            b.at("aligner"), config.vision.hidden_size, hidden, "gelu", up="linear1",
            down="linear2", outputs=hidden,
        )  # fmt: skip

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        pixels, counts = stacked(self, items, "pixel_values")
        states = yield from self.tower.run(pixels)
        tokens: Tensor = self.projector(states.flatten(0, 1))
        return tokens.split([count * states.shape[1] for count in counts])

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["DeepseekVLForConditionalGeneration"],
            "model_type": "deepseek_vl",
            "image_token_id": 480,
            "tie_word_embeddings": False,
            "text_config": tiny_text(),
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
