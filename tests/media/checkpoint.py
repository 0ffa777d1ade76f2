"""A tiny checkpoint that reads images."""

from __future__ import annotations

from pathlib import Path

from modulm.plugins import manager
from modulm_towers.testing import ImageFamily, write_family

__all__ = ["SLOTS", "write_llava"]

#: Tokens of an image.
SLOTS = 16


def write_llava(folder: Path) -> Path:
    """LLaVA with its processor; `<image>` stands for an image."""
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    def processor(tokenizer):
        return LlavaProcessor(
            CLIPImageProcessorPil(
                size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
            ),
            tokenizer,
            patch_size=7,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )

    driver = manager.current().load("models", "LlavaForConditionalGeneration")
    return write_family(ImageFamily(driver, {"image_token": "<image>"}, processor), folder)
