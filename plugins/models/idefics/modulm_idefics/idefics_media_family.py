"""Media families of Idefics 3 and SmolVLM: tiles, labelled in the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from modulm.errors import RequestError
from modulm_media import MediaFamily

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["ColModernVBertFamily", "IdeficsFamily", "SmolVLMFamily"]


class IdeficsFamily(MediaFamily):
    """Idefics 3, SmolVLM."""

    def tensors(self, outputs: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        if not np.asarray(outputs.get("pixel_attention_mask", True)).all():
            raise RequestError(
                "not supported yet: images padded by the processor. Enable resizing instead.",
                "multi_modal_data",
            )
        return {"pixel_values": np.asarray(outputs["pixel_values"])}


class ColModernVBertFamily(IdeficsFamily):
    """ColModernVBERT."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        config = files.table("config")
        if "vlm_config" in config:
            return super().open_processor(files)
        # The merged files may name Idefics 3's processor, or code.
        parts = {name: files.part(name) for name in ("image_processor", "tokenizer")}
        processor = files.from_parts("colmodernvbert", "ColModernVBertProcessor", parts)
        vision, factor = config["vision_config"], int(config.get("pixel_shuffle_factor", 4))
        side = int(vision["image_size"]) // int(vision["patch_size"]) // factor
        processor.image_seq_len = side * side
        return processor

    def document(self, kind: str, is_only_item: bool) -> str:
        page: str = self.processor.visual_prompt_prefix
        return page if is_only_item else self.mark(kind)


class SmolVLMFamily(IdeficsFamily):
    """SmolVLM accepts video: frames are images without tiles."""

    kinds = ("image", "video")

    def features(self, kind: str) -> Sequence[int]:
        return super().features("image")
