"""Media family of Keye-VL: image positions count time, height and width."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from modulm_media import GridFamily

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["KeyeFamily"]

_IMAGES = "transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl"
#: The image processor's settings that files have.
_SETTINGS = (
    "size", "min_pixels", "max_pixels", "patch_size", "merge_size", "image_mean", "image_std",
)  # fmt: skip
_TOKEN = "<|image_pad|>"
#: SigLIP's.
_HALF = [0.5, 0.5, 0.5]


class KeyeFamily(GridFamily):
    """Keye-VL, whose files name code. PaddleOCR-VL's processor does the same."""

    kinds = ("image",)

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        written, tokenizer = files.settings("image_processor"), files.part("tokenizer")
        number = tokenizer.convert_tokens_to_ids(_TOKEN)
        if number is None or number == tokenizer.unk_token_id:
            raise ValueError(f"its tokenizer has no token {_TOKEN}")
        for name, value in (("image_token", _TOKEN), ("image_token_id", number)):
            object.__setattr__(tokenizer, name, value)
        pixels = {"min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 1280}
        settings = {name: written[name] for name in _SETTINGS if name in written}
        if "size" in settings:
            pixels = {}
        images = import_module(_IMAGES).PaddleOCRVLImageProcessorPil(
            **{**pixels, "image_mean": _HALF, "image_std": _HALF, **settings}
        )
        parts = {"image_processor": images, "tokenizer": tokenizer}
        return files.from_parts("paddleocr_vl", "PaddleOCRVLProcessor", parts)

    def document(self, kind: str, is_only_item: bool) -> str:
        return f"<|vision_start|>{self.mark(kind)}<|vision_end|>"
