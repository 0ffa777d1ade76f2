"""Media family of Step 3 VL: the whole image after windows of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from modulm_media import MediaFamily

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["StepVLFamily"]


class StepVLFamily(MediaFamily):
    """Step 3 VL: transformers' processor of Step 3.7, whatever code the files name."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        from modulm_media.images import image_processor_class

        vision = files.table("config").get("vision_config") or {}
        side, patch = int(vision.get("image_size", 728)), int(vision.get("patch_size", 14))
        # Windows are resized to 504 pixels where whole images have 728.
        images = image_processor_class("Step3p7ImageProcessor")(
            size={"height": side, "width": side},
            patch_size=side * 9 // 13 // (4 * patch) * 4 * patch,
            vision_patch_size=patch,
        )
        parts = {"image_processor": images, "tokenizer": files.part("tokenizer")}
        return files.from_parts("step3p7", "Step3p7Processor", parts)

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.processor.image_token_id),)
