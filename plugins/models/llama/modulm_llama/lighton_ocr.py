"""LightOnOCR (2025): Mistral Small 3.1's encoder and projector before Qwen 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm.nn import WeightNames
from modulm_llama.mistral3 import Mistral3ForConditionalGeneration
from modulm_towers import flat_patches, tiny_text

__all__ = ["LightOnOcrForConditionalGeneration"]


class LightOnOcrForConditionalGeneration(Mistral3ForConditionalGeneration):
    """LightOnOCR; the text model is Qwen 3."""

    names = WeightNames(
        rename=(
            (r"^vision_encoder\.", "vision_tower."),
            (r"^vision_projection\.", "multi_modal_projector."),
        ),
        rewrite=(flat_patches(r"\.patch_conv\.weight$"),),
    )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        like = super().tiny()
        return {
            "architectures": ["LightOnOcrForConditionalGeneration"],
            "model_type": "lighton_ocr",
            "image_token_id": 480,
            "spatial_merge_size": 2,
            "tie_word_embeddings": False,
            "text_config": tiny_text("qwen3", head_dim=16),
            "vision_config": like["vision_config"],
        }
