"""Media families of BAGEL, Isaac, Kanana and openPangu VL: images cut in patches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from modulm_media import GridFamily, Media, MediaFamily, Processed

if TYPE_CHECKING:
    from PIL.Image import Image

    from modulm_media.processors import ProcessorFiles

__all__ = ["BagelFamily", "IsaacFamily", "IsaacProcessor", "KananaFamily", "OpenPanguFamily"]

_SIGLIP = "transformers.models.siglip.image_processing_pil_siglip"
_QWEN = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
_PAD = "<|image_pad|>"
#: How precisely Isaac's scale of an image is found.
_PRECISION = 1e-5


class BagelFamily(MediaFamily):
    """BAGEL: images of one size; each patch is a token."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        tokenizer, written = files.part("tokenizer"), files.settings("image_processor")
        vision = files.table("config").get("vit_config") or {}
        side = int(vision.get("image_size", 980))
        names = ("image_mean", "image_std", "resample")
        settings = {name: written[name] for name in names if name in written}
        images = import_module(_SIGLIP).SiglipImageProcessorPil(
            **{"size": {"height": side, "width": side}, **settings}
        )
        return _Parts(_with_token(tokenizer, _PAD), images)

    def mark(self, kind: str) -> str:
        return _PAD

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.processor.tokenizer.image_token_id),)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        reader, vision = self.processor.image_processor, self.config.get("vit_config") or {}
        outputs = reader(images=[media.value.convert("RGB")], return_tensors="pt", **options)
        side = int(vision.get("image_size", 980)) // int(vision.get("patch_size", 14))
        return {**outputs, "input_ids": [list(self.features(media.kind)) * (side * side)]}


@frozen(eq=False)
class _Parts:
    """A tokenizer with a placeholder, beside an image processor."""

    tokenizer: Any
    image_processor: Any

    @property
    def chat_template(self) -> Any:
        """The tokenizer's."""
        return self.tokenizer.chat_template


def _with_token(tokenizer: Any, token: str) -> Any:
    """Return the tokenizer, whose `image_token` the token is. Raises ValueError without it."""
    number = tokenizer.convert_tokens_to_ids(token)
    if number is None or number == tokenizer.unk_token_id:
        raise ValueError(f"its tokenizer has no token {token}")
    for name, value in (("image_token", token), ("image_token_id", number)):
        object.__setattr__(tokenizer, name, value)
    return tokenizer


@frozen(eq=False, kw_only=True)
class IsaacProcessor:
    """Resizes images to grids of patches, for a tokenizer with the placeholder.

    merge: patches along the side of a token. least, most: patches of an image.
    """

    tokenizer: Any
    patch: int
    merge: int
    least: int | None
    most: int

    @property
    def chat_template(self) -> Any:
        """The tokenizer's."""
        return self.tokenizer.chat_template

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of patches for an image of (width, height), within the limits."""
        width, height = size
        rows, columns = self._scaled(height, 1.0), self._scaled(width, 1.0)
        if self.least is not None and rows * columns < self.least:
            low, high = 1.0, 100.0
        elif rows * columns <= self.most:
            return rows, columns
        else:
            low, high = _PRECISION / 10, 1.0
        grows = low >= 1.0
        while high - low >= _PRECISION:
            scale = (low + high) / 2
            count = self._scaled(height, scale) * self._scaled(width, scale)
            if count >= (self.least or 0) if grows else count > self.most:
                high = scale
            else:
                low = scale
        scale = high if grows else low
        return self._scaled(height, scale), self._scaled(width, scale)

    def _scaled(self, length: int, scale: float) -> int:
        """Patches along a side of that many pixels, a multiple of those of a token."""
        return max(math.ceil(scale * length / (self.patch * self.merge)), 1) * self.merge

    def patches(self, image: Image) -> tuple[np.ndarray, tuple[int, int]]:
        """([patches, values] float32, channels last; (rows, columns))."""
        import torch

        rows, columns = self.grid(image.size)
        tensor = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None]
        # Bytes stay bytes, as in the published processor.
        resized = torch.nn.functional.interpolate(
            tensor, (rows * self.patch, columns * self.patch), mode="bilinear", align_corners=False
        )
        pixels = (resized[0].permute(1, 2, 0).float() / 255 - 0.5) / 0.5
        cut = pixels.view(rows, self.patch, columns, self.patch, 3).transpose(1, 2)
        return cut.reshape(rows * columns, -1).numpy(), (rows, columns)


class IsaacFamily(MediaFamily):
    """Isaac: positions count time, rows and columns; rows and columns of an image begin at 0."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        config, written = files.table("config"), files.settings("image_processor")
        vision = config.get("vision_config") or {}
        scale = vision.get("pixel_shuffle_scale_factor", config.get("pixel_shuffle_scale", 1))
        least = written.get("vision_min_num_patches", config.get("vision_min_num_patches"))
        most = written.get("vision_max_num_patches", config.get("vision_max_num_patches", 256))
        return IsaacProcessor(
            tokenizer=_with_token(files.part("tokenizer"), _PAD),
            patch=int(vision.get("patch_size", 16)), merge=int(scale),
            least=None if least is None else int(least), most=int(most),
        )  # fmt: skip

    def mark(self, kind: str) -> str:
        return str(self.config.get("vision_token", "<image>"))

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.processor.tokenizer.image_token_id),)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if options:
            raise ValueError(f"{next(iter(options))}: this model's processor takes no options")
        pixels, (rows, columns) = self.processor.patches(media.value)
        count = rows * columns // self.processor.merge**2
        return {
            "pixel_values": pixels,
            "image_grid_thw": np.array([[1, rows, columns]]),
            "input_ids": [list(self.features(media.kind)) * count],
        }

    def positions(
        self, tokens: np.ndarray, items: Sequence[tuple[int, Processed]]
    ) -> np.ndarray | None:
        positions = np.zeros((3, len(tokens)), dtype=np.int64)
        at = position = 0
        for first, item in items:
            positions[:, at:first] = position + np.arange(first - at)
            position += first - at
            _, rows, columns = item.tensors["image_grid_thw"].reshape(-1).tolist()
            grid = (1, rows // self.processor.merge, columns // self.processor.merge)
            at = first + grid[1] * grid[2]
            positions[:, first:at] = np.indices(grid).reshape(3, -1)
            positions[0, first:at] += position
            position += 1
        positions[:, at:] = position + np.arange(len(tokens) - at)
        return positions


class KananaFamily(MediaFamily):
    """Kanana V: a line feed before an image and between the rows of its tokens, as published."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        config, written = files.table("config"), files.settings("image_processor")
        names = ("image_mean", "image_std", "min_pixels", "max_pixels", "patch_size",
                 "temporal_patch_size", "merge_size")  # fmt: skip
        settings = {name: written[name] for name in names if name in written}
        limits = {"min_pixels": 56 * 56, "max_pixels": 14 * 14 * 4 * 1280}
        images = import_module(_QWEN).Qwen2VLImageProcessorPil(**{**limits, **settings})
        end = (config.get("text_config") or {}).get("eos_token_id")
        if not isinstance(end, int):
            raise ValueError("text_config.eos_token_id: must be a number")
        tokenizer = files.part("tokenizer")
        # The token after the text's last one has no text of its own.
        object.__setattr__(tokenizer, "image_token_id", end + 1)
        return _Parts(tokenizer, images)

    def mark(self, kind: str) -> str:
        return "<image>"

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.processor.tokenizer.image_token_id),)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        reader, image = self.processor.image_processor, media.value.convert("RGB")
        least = reader.patch_size * reader.merge_size
        if (short := min(image.size)) < least:
            sides = [int(side * (least / short)) for side in image.size]
            image = image.resize((max(sides[0], least), max(sides[1], least)), resample=3)
        outputs = reader(images=[image], return_tensors="pt", **options)
        _, rows, columns = (int(n) for n in outputs["image_grid_thw"].reshape(-1))
        rows, columns = rows // reader.merge_size, columns // reader.merge_size
        feed = self.processor.tokenizer("\n", add_special_tokens=False)["input_ids"]
        line = [*feed, *list(self.features(media.kind)) * columns]
        return {**outputs, "input_ids": [line * rows]}


class OpenPanguFamily(GridFamily):
    """openPangu VL: Qwen2-VL's patches, of images with more than 28 pixels on both sides."""

    kinds = ("image",)

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        written = files.settings("image_processor")
        vision = files.table("config").get("vision_config") or {}
        names = ("image_mean", "image_std", "min_pixels", "max_pixels", "size", "merge_size")
        settings = {name: written[name] for name in names if name in written}
        patch = int(written.get("patch_size", vision.get("patch_size", 14)))
        images = import_module(_QWEN).Qwen2VLImageProcessorPil(**settings, patch_size=patch)
        return _Parts(_with_token(files.part("tokenizer"), "[unused19]"), images)

    def mark(self, kind: str) -> str:
        return "[unused19]"

    def document(self, kind: str, is_only_item: bool) -> str:
        return f"[unused18]{self.mark(kind)}[unused20]"

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.processor.tokenizer.image_token_id),)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        reader, image = self.processor.image_processor, media.value.convert("RGB")
        if (short := min(image.size)) <= 28:
            image = image.resize(tuple(int(56 / short * side) for side in image.size), resample=3)
        outputs = reader(images=[image], return_tensors="pt", **options)
        count = int(outputs["image_grid_thw"].prod()) // reader.merge_size**2
        return {**outputs, "input_ids": [list(self.features(media.kind)) * count]}
