"""Media family of Moondream 3: one image, at the beginning of a prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, frozen

from modulm.errors import RequestError
from modulm_media import Media, MediaFamily, Processed

if TYPE_CHECKING:
    from PIL.Image import Image

    from modulm_media.processors import ProcessorFiles

__all__ = ["MoondreamFamily", "MoondreamProcessor"]

#: A prompt's beginning with an image; the first token keeps its embedding.
_MARK = "<|endoftext|><image>"


@frozen(eq=False, kw_only=True)
class MoondreamProcessor:
    """Cuts images into overlapping crops.

    side, patch: pixels along a crop and a patch. margin: patches that neighbours share.
    """

    tokenizer: Any
    side: int
    patch: int
    margin: int
    most: int

    @property
    def chat_template(self) -> Any:
        """The tokenizer's."""
        return self.tokenizer.chat_template

    def crops(self, image: Image) -> tuple[np.ndarray, tuple[int, int]]:
        """([1 + crops, 3, side, side] float32, an overview first; (rows, columns))."""
        from PIL import Image as Images

        image, border = image.convert("RGB"), 2 * self.margin * self.patch
        step = self.side // self.patch * self.patch - border
        rows, columns = self._tiling(image.height - border, image.width - border, step)
        size = (columns * step + border, rows * step + border)
        whole = np.asarray(image.resize(size, Images.Resampling.LANCZOS))
        overview = np.asarray(image.resize((self.side, self.side), Images.Resampling.LANCZOS))
        views = np.zeros((1 + rows * columns, self.side, self.side, 3), np.uint8)
        views[0] = overview
        for index in range(rows * columns):
            top, left = index // columns * step, index % columns * step
            part = whole[top : top + self.side, left : left + self.side]
            views[1 + index, : part.shape[0], : part.shape[1]] = part
        pixels = (views.astype(np.float32) / 255 - 0.5) / 0.5
        return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)), (rows, columns)

    def _tiling(self, height: int, width: int, step: int) -> tuple[int, int]:
        """(rows, columns) of crops."""
        if height <= step or width <= step:
            return 1, 1
        least = math.ceil(height / step), math.ceil(width / step)
        if least[0] * least[1] > self.most:
            scale = math.sqrt(self.most / (least[0] * least[1]))
            return max(1, math.floor(least[0] * scale)), max(1, math.floor(least[1] * scale))
        rows = max(math.floor(math.sqrt(self.most * height / width)), least[0])
        columns = max(math.floor(math.sqrt(self.most * width / height)), least[1])
        if rows * columns > self.most:
            if columns > rows:
                columns = self.most // rows
            else:
                rows = self.most // columns
        return max(1, rows), max(1, columns)


class MoondreamFamily(MediaFamily):
    """Moondream 3. The first token and the image's attend in both directions."""

    bidirectional = True

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        inner = files.table("config").get("config") or {}
        vision = inner.get("vision") or {}
        return MoondreamProcessor(
            tokenizer=files.part("tokenizer"), side=int(vision.get("crop_size", 378)),
            patch=int(vision.get("enc_patch_size", 14)),
            margin=int(vision.get("overlap_margin", 4)), most=int(vision.get("max_crops", 12)),
        )  # fmt: skip

    def mark(self, kind: str) -> str:
        return _MARK

    def features(self, kind: str) -> Sequence[int]:
        return (self._tokens()[-1],)

    def _tokens(self) -> list[int]:
        """The tokens of a prompt's beginning with an image."""
        ids: list[int] = self.processor.tokenizer(_MARK, add_special_tokens=False)["input_ids"]
        if len(ids) < 2 or ids[0] == ids[-1]:
            raise ValueError(f"its tokenizer makes {ids} of {_MARK}")
        return ids

    def group_media(
        self, tokens: np.ndarray, media: Sequence[Media], options: Mapping[str, Any]
    ) -> tuple[np.ndarray, Sequence[Media]]:
        if len(media) > 1:
            message = f"{len(media)} images: the model takes one in a prompt"
            raise RequestError(message, "multi_modal_data")
        return tokens, media

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if options:
            raise ValueError(f"{next(iter(options))}: this model's processor takes no options")
        pixels, tiling = self.processor.crops(media.value)
        side, ids = self.processor.side // self.processor.patch, self._tokens()
        return {
            "pixel_values": pixels,
            "tiling": np.array([tiling]),
            "input_ids": [[ids[0]] + [ids[-1]] * (side * side)],
        }

    def process(self, media: Media, options: Mapping[str, Any]) -> Processed:
        processed = super().process(media, options)
        return evolve(processed, spans=((0, len(processed.tokens)),))
