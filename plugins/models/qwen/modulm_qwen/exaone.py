"""EXAONE 4.5: Qwen2.5-VL's encoder with fewer key heads, before EXAONE 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm_qwen.vl import Qwen25VLForConditionalGeneration
from modulm_towers import tiny_text

__all__ = ["Exaone45ForConditionalGeneration"]


class Exaone45ForConditionalGeneration(Qwen25VLForConditionalGeneration):
    """EXAONE 4.5. Its text model counts the tokens of images like those of text."""

    prunes_videos = False
    axes = 1

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        table = super().tiny()
        return {
            "architectures": ["Exaone4_5_ForConditionalGeneration"],
            "model_type": "exaone4_5",
            "image_token_id": 480,
            "video_token_id": 481,
            "tie_word_embeddings": False,
            "text_config": tiny_text("exaone4", layer_types=["full_attention"] * 3),
            "vision_config": {
                **table["vision_config"],
                "model_type": "exaone4_5_vision",
                "num_heads": 4,
                "num_key_value_heads": 2,
                "hidden_size": 64,
            },
        }
