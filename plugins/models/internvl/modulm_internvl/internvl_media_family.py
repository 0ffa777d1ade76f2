"""Media families of InternVL: images as tiles with a thumbnail, and video."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from modulm_internvl.processor import open_processor, published_processor
from modulm_media import Media, MediaFamily

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = [
    "EagleFamily",
    "H2OvlFamily",
    "InternVLChatFamily",
    "InternVLFamily",
    "NvlmDFamily",
    "QianfanFamily",
]


class InternVLFamily(MediaFamily):
    """InternVL, in the format of transformers. Video frames are processed like images."""

    kinds = ("image", "video")

    def features(self, kind: str) -> Sequence[int]:
        return super().features("image")

    def tensors(self, outputs: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        return {"pixel_values": np.asarray(outputs["pixel_values"])}


class InternVLChatFamily(InternVLFamily):
    """InternVL, in the format that it is published in."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        return open_processor(files)


class QianfanFamily(InternVLFamily):
    """Qianfan-OCR: images, whose placeholder is text."""

    kinds = ("image",)

    def mark(self, kind: str) -> str:
        mark: str = self.processor.image_placeholder_token
        return mark


class EagleFamily(InternVLFamily):
    """Eagle 2.5, of images."""

    kinds = ("image",)

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        return published_processor(files)


class H2OvlFamily(EagleFamily):
    """H2OVL: one tile more than its files say, beside the thumbnail."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        processor = published_processor(files)
        if processor.image_processor.max_patches > 1:
            processor.image_processor.max_patches += 1
        return processor


class NvlmDFamily(EagleFamily):
    """NVLM-D: each tile has a tag before its tokens."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        return published_processor(files, {"context_image_token": "<|vision_pad|>"})

    def mark(self, kind: str) -> str:
        return "<image>"

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.processor.tokenizer.context_image_token_id),)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        reader, tokenizer = self.processor.image_processor, self.processor.tokenizer
        outputs = reader(images=[media.value], return_tensors="pt", **options)
        tags = [f"<tile_{i}>" for i in range(1, len(outputs["pixel_values"]))]
        tokens = tokenizer.context_image_token * int(self.processor.image_seq_length)
        tiles = "".join(f"{tag}{tokens}" for tag in (*tags, "<tile_global_thumbnail>"))
        text = f"<Image>{tiles}</Image>"
        ids = tokenizer([text], add_special_tokens=False)["input_ids"]
        return {"pixel_values": outputs["pixel_values"], "input_ids": ids}
