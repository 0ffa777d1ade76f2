"""Media families of the LLaVA models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, frozen

from modulm.errors import CheckpointError
from modulm_media import MediaFamily
from modulm_media.rows import RowsFamily

if TYPE_CHECKING:
    from modulm_media import Media, Processed
    from modulm_media.processors import ProcessorFiles

__all__ = [
    "LlavaFamily",
    "LlavaNextVideoFamily",
    "LlavaOnevision2Family",
    "LlavaOnevisionFamily",
    "MantisFamily",
    "PreNormFamily",
    "TarsierFamily",
]


class LlavaFamily(RowsFamily):
    """Uses the processor's output unchanged."""


class LlavaNextVideoFamily(LlavaFamily):
    """Also accepts videos."""

    kinds = ("image", "video")


class LlavaOnevisionFamily(LlavaNextVideoFamily):
    """Every image of a prompt is tiled, even if there are several."""

    def tensors(self, outputs: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        names = ("pixel_values", "image_sizes", "pixel_values_videos")
        return {name: np.asarray(outputs[name]) for name in names if name in outputs}


class PreNormFamily(LlavaOnevisionFamily):
    """Bee and R-4B: LLaVA-OneVision's processor, whatever code the files name. Only images."""

    kinds = ("image",)

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        parts = {name: files.part(name) for name in ("image_processor", "tokenizer")}
        parts["video_processor"] = None
        processor = files.from_parts("llava_onevision", "LlavaOnevisionProcessor", parts)
        config = files.table("config")
        vision = config.get("vision_config") or {}
        side = int(vision.get("image_size", 384)) // int(vision.get("patch_size", 14))
        processor.num_image_tokens = side * side
        processor.vision_feature_select_strategy = "full"
        processor.vision_aspect_ratio = str(config.get("vision_aspect_ratio", "anyres_max_9"))
        return processor


class _BuiltFamily(LlavaFamily):
    """LLaVA's processor from its parts, whatever code the files name."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        parts = {name: files.part(name) for name in ("image_processor", "tokenizer")}
        processor = files.from_parts("llava", "LlavaProcessor", parts)
        config = files.table("config")
        vision = config.get("vision_config") or {}
        processor.patch_size = int(vision.get("patch_size", 14))
        strategy = str(config.get("vision_feature_select_strategy", "default"))
        processor.vision_feature_select_strategy = strategy
        # CLIP's encoder has a class token, SigLIP's has none.
        has_class = "siglip" not in str(vision.get("model_type", "clip_vision_model"))
        processor.num_additional_image_tokens = int(has_class)
        return processor


class TarsierFamily(_BuiltFamily):
    """Tarsier: `image_newline_idx` is the token after a row, `image_new_idx` the last one."""

    def process(self, media: Media, options: Mapping[str, Any]) -> Processed:
        processed = super().process(media, options)
        rows = math.isqrt(len(processed.tokens))
        grid = processed.tokens[: rows * rows].reshape(rows, rows)
        newline, last = (self._token(f"image_{name}_idx") for name in ("newline", "new"))
        ends = np.full((rows, 1), newline, dtype=np.int64)
        tokens = np.append(np.concatenate([grid, ends], axis=1).ravel(), last)
        embedded = np.isin(tokens, self.features(media.kind))
        return evolve(processed, tokens=tokens, embedded=embedded)

    def _token(self, key: str) -> int:
        token = self.config.get(key)
        if not isinstance(token, int):
            raise CheckpointError(f"config.json: {key}: a token's id is needed, got {token!r}")
        return token


class MantisFamily(_BuiltFamily):
    """Mantis: an image's tokens are between "(image 1: <Image>" and "</Image>)"."""

    def complete_prompt(self, tokens: np.ndarray, mark: np.ndarray) -> np.ndarray:
        parts: list[np.ndarray] = []
        at = count = 0
        for first in range(len(tokens) - len(mark) + 1):
            if first >= at and np.array_equal(tokens[first : first + len(mark)], mark):
                count += 1
                end = first + len(mark)
                before, after = self._encode(f"(image {count}: <Image>"), self._encode("</Image>)")
                parts += [tokens[at:first], before, tokens[first:end], after]
                at = end
        return np.concatenate([*parts, tokens[at:]])

    def _encode(self, text: str) -> np.ndarray:
        ids = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.asarray(ids, dtype=np.int64)


@frozen(eq=False)
class _Parts:
    """A tokenizer and an image processor of their own classes."""

    tokenizer: Any
    image_processor: Any

    @property
    def chat_template(self) -> Any:
        """The tokenizer's."""
        return self.tokenizer.chat_template


class LlavaOnevision2Family(MediaFamily):
    """LLaVA-OneVision 2: Qwen2-VL's patches of single images, whatever code the files name."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        written = files.settings("image_processor")
        vision = files.table("config").get("vision_config") or {}
        names = ("image_mean", "image_std", "min_pixels", "max_pixels", "size", "resample")
        settings = {name: written[name] for name in names if name in written}
        module = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
        images = import_module(module).Qwen2VLImageProcessorPil(
            **settings, patch_size=int(vision.get("patch_size", 14)), temporal_patch_size=1,
            merge_size=int(vision.get("spatial_merge_size", 2)),
        )  # fmt: skip
        return _Parts(files.part("tokenizer"), images)

    def mark(self, kind: str) -> str:
        return "<|image_pad|>"

    def document(self, kind: str, is_only_item: bool) -> str:
        return f"<|vision_start|>{self.mark(kind)}<|vision_end|>"

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.config.get("image_token_id", 151655)),)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        reader = self.processor.image_processor
        outputs = reader(images=[media.value.convert("RGB")], return_tensors="pt", **options)
        count = int(outputs["image_grid_thw"].prod()) // reader.merge_size**2
        return {**outputs, "input_ids": [list(self.features(media.kind)) * count]}
