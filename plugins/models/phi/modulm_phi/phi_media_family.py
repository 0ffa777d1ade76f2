"""Media families of Phi-3 vision, Phi-4 multimodal and Phi-4 reasoning vision."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from attrs import evolve

from modulm_media import Media, MediaFamily
from modulm_phi.padded_tiles import PaddedTiles

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["Phi3VisionFamily", "Phi4VisionFamily", "Phi4VisionProcessor", "PhiFamily"]

_IMAGES = "transformers.models.siglip2.image_processing_pil_siglip2"
#: A token of the vocabulary that has no other use; its embedding is replaced.
_DUMMY = "<|dummy_0|>"
#: The placeholder of Phi-3 vision, which its published prompts number instead.
_IMAGE = "<|image|>"


class PhiFamily(MediaFamily):
    """Phi-4 multimodal, whose audio projection depends on whether the prompt has images."""

    kinds = ("image", "audio")
    image_processors: ClassVar = {
        "Phi4MultimodalImageProcessor": "modulm_phi.tiles:Phi4MultimodalImageProcessorPil"
    }

    @property
    def rate(self) -> int:
        """The processor's audio sampling rate in Hz."""
        return int(self.processor.audio_processor.sampling_rate)

    def extra_tensors(self, kind: str, kinds: Collection[str]) -> Mapping[str, np.ndarray]:
        return {"beside_images": np.array("image" in kinds)} if kind == "audio" else {}


class Phi4VisionProcessor:
    """SigLIP 2's image processor beside a tokenizer."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor = image_processor
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template


class Phi4VisionFamily(MediaFamily):
    """Phi-4 reasoning vision: an image keeps its number of patches, within limits."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        written, tokenizer = files.settings("image_processor"), files.part("tokenizer")
        number = tokenizer.convert_tokens_to_ids(_DUMMY)
        if number is None or number == tokenizer.unk_token_id:
            raise ValueError(f"its tokenizer has no token {_DUMMY}")
        vision = files.table("config").get("vision_config") or {}
        names = ("image_mean", "image_std", "resample")
        settings = {name: written[name] for name in names if name in written}
        settings["patch_size"] = int(vision.get("patch_size", 16))
        images = import_module(_IMAGES).Siglip2ImageProcessorPil(**settings)
        return Phi4VisionProcessor(images, tokenizer)

    def mark(self, kind: str) -> str:
        return "<image>"

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.processor.tokenizer.convert_tokens_to_ids(_DUMMY)),)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        reader, image = self.processor.image_processor, media.value
        side = reader.patch_size
        least = int(self.config.get("min_num_patches", 256))
        most = int(self.config.get("max_num_patches", 3600))
        count = (image.height // side) * (image.width // side)
        limit = {"max_num_patches": max(min(count, most), least)}
        outputs = reader(images=[image], return_tensors="pt", **{**limit, **options})
        tokens = int(outputs["spatial_shapes"].prod())
        return {**outputs, "input_ids": [list(self.features(media.kind)) * tokens]}


class Phi3VisionFamily(MediaFamily):
    """Phi-3 and 3.5 vision. Placeholders are `<|image|>`, or `<|image_1|>` and so on, in order."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        written, tokenizer = files.settings("image_processor"), files.part("tokenizer")
        number = tokenizer.convert_tokens_to_ids(_IMAGE)
        if number is None or number == tokenizer.unk_token_id:
            raise ValueError(f"its tokenizer has no token {_IMAGE}")
        encoder = files.table("config").get("img_processor") or {}
        names = {"mean": "image_mean", "std": "image_std"}
        settings = {
            name: tuple(map(float, written[key])) for name, key in names.items() if key in written
        }
        side, most = int(encoder.get("image_size", 336)), int(written.get("num_crops", 1))
        return PaddedTiles(tokenizer, side, most, **settings)

    def mark(self, kind: str) -> str:
        return _IMAGE

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.processor.tokenizer.convert_tokens_to_ids(_IMAGE)),)

    def complete_prompt(self, tokens: np.ndarray, mark: np.ndarray) -> np.ndarray:
        """Numbered placeholders become `mark`."""
        tokenizer, number, left = self.processor.tokenizer, 1, tokens.tolist()
        while True:
            numbered = tokenizer.encode(f"<|image_{number}|>", add_special_tokens=False)
            size = len(numbered)
            at = [i for i in range(len(left) - size + 1) if left[i : i + size] == numbered]
            if not at:
                return np.array(left, dtype=np.int64)
            left[at[0] : at[0] + size] = mark.tolist()
            number += 1

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if set(options) - {"num_crops"}:
            raise ValueError(f"{', '.join(options)}: not supported yet, only num_crops")
        reader = self.processor
        if "num_crops" in options:
            reader = evolve(reader, most=int(options["num_crops"]))
        outputs = reader(media.value)
        encoder = self.config["img_processor"]
        line = reader.side // int(encoder.get("patch_size", 14)) // 2
        rows, columns = (int(size) // reader.side for size in outputs["image_sizes"])
        # Lines of tiles and of the whole image end with a separator; one more is between them.
        count = (rows * columns + 1) * line**2 + (rows + 1) * line + 1
        return {**outputs, "input_ids": [list(self.features(media.kind)) * count]}
