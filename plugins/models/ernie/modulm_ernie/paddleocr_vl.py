"""PaddleOCR-VL (arXiv 2510.14528): a NaViT encoder for images of any size before a small ERNIE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.errors import CheckpointError
from modulm_towers import (
    MultimodalConfig,
    NavitConfig,
    NavitModel,
    tiny_text,
)

__all__ = ["PaddleOCRVLConfig", "PaddleOCRVLForConditionalGeneration"]


@frozen(eq=False, kw_only=True)
class PaddleOCRVLConfig(MultimodalConfig):
    """config.json of PaddleOCR-VL."""

    vision_type: ClassVar[type] = NavitConfig

    @classmethod
    def more(cls, keys: Mapping[str, Any], file: str) -> dict[str, Any]:
        if keys["text_config"].get("use_bias"):
            raise CheckpointError(f"{file}: use_bias: not supported yet: true")
        return {}


class PaddleOCRVLForConditionalGeneration(NavitModel):
    """PaddleOCR-VL; its text model is Llama's block with positions on three axes."""

    api = 1
    config_type: ClassVar[type] = PaddleOCRVLConfig

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
