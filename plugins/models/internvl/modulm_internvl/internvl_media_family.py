"""Media families of InternVL: images as tiles with a thumbnail, and video."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from modulm_internvl.processor import open_processor
from modulm_media import MediaFamily

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["InternVLChatFamily", "InternVLFamily", "QianfanFamily"]


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
