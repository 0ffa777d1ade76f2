"""Media families of Ovis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from modulm_media import Media, MediaFamily

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["Ovis25Family", "OvisFamily"]

_IMAGES = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
_PAD = "<|image_pad|>"
#: Pixels of an image in Ovis 2.5, at least and at most.
_PIXELS = {"min_pixels": 448 * 448, "max_pixels": 1792 * 1792}
#: The image processor's settings that files have.
_SETTINGS = ("image_mean", "image_std", "resample", "min_pixels", "max_pixels")
#: SigLIP's.
_HALF = [0.5, 0.5, 0.5]


class OvisFamily(MediaFamily):
    """Ovis 2: tiles, separated by tokens. The encoder embeds all tokens of the placeholder."""

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.config["image_token_id"]), *self.config["visual_indicator_token_ids"])

    def tensors(self, outputs: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        tokens = np.asarray(outputs["input_ids"][0], dtype=np.int64)
        return {"pixel_values": np.asarray(outputs["pixel_values"]), "tokens": tokens}


class Ovis25Family(MediaFamily):
    """Ovis 2.5 and 2.6: patches as Qwen2-VL's, between two tokens that the encoder embeds."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        written, tokenizer = files.settings("image_processor"), files.part("tokenizer")
        number = tokenizer.convert_tokens_to_ids(_PAD)
        if number is None or number == tokenizer.unk_token_id:
            raise ValueError(f"its tokenizer has no token {_PAD}")
        for name, value in (("image_token", _PAD), ("image_token_id", number)):
            object.__setattr__(tokenizer, name, value)
        vision = files.table("config").get("vit_config") or {}
        sizes = {
            "patch_size": int(vision.get("patch_size", 16)),
            "merge_size": int(vision.get("hidden_stride", 2)),
            "temporal_patch_size": 1,
        }
        settings = {name: written[name] for name in _SETTINGS if name in written}
        images = import_module(_IMAGES).Qwen2VLImageProcessorPil(
            **{"image_mean": _HALF, "image_std": _HALF, **_PIXELS, **settings, **sizes}
        )
        parts = {"image_processor": images, "tokenizer": tokenizer, "video_processor": None}
        return files.from_parts("qwen2_vl", "Qwen2VLProcessor", parts)

    def mark(self, kind: str) -> str:
        return "<image>"

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.processor.tokenizer.image_token_id),)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        reader = self.processor.image_processor
        outputs = reader(images=[media.value], return_tensors="pt", **options)
        count = int(outputs["image_grid_thw"].prod()) // reader.merge_size**2 + 2
        return {**outputs, "input_ids": [list(self.features(media.kind)) * count]}
