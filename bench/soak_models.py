"""Checkpoints of the soak: a tiny LLaVA, and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modulm.plugins import current
from modulm.testing.adapters import write_lora
from modulm_towers.testing import ImageFamily, write_family

__all__ = ["write_adapters", "write_llava"]


def write_llava(folder: Path) -> Path:
    """Write a random LLaVA whose images have 28 x 28 pixels and take 16 tokens."""
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    side = {"height": 28, "width": 28}

    def processor(tokenizer: Any) -> Any:
        return LlavaProcessor(
            CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=side),
            tokenizer,
            patch_size=7,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )

    driver = current().load("models", "LlavaForConditionalGeneration")
    return write_family(ImageFamily(driver, {"image_token": "<image>"}, processor), folder)


def write_adapters(folder: Path, layers: int, prefix: str, shape: tuple[int, int]) -> None:
    """Write four adapters of `q_proj`, named a0 to a3. shape: (inputs, outputs)."""
    for seed in range(4):
        names = [f"{prefix}.layers.{place}.self_attn.q_proj" for place in range(layers)]
        write_lora(folder / f"a{seed}", dict.fromkeys(names, shape), 4, seed)
