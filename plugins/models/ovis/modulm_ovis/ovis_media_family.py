"""Media families of Ovis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from modulm_media import Media, MediaFamily

if TYPE_CHECKING:
    from PIL.Image import Image

    from modulm_media.processors import ProcessorFiles

__all__ = ["Ovis25Family", "OvisFamily", "OvisPublishedFamily", "OvisProcessor"]

_IMAGES = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
_PAD = "<|image_pad|>"
#: Pixels of an image in Ovis 2.5, at least and at most.
_PIXELS = {"min_pixels": 448 * 448, "max_pixels": 1792 * 1792}
#: The image processor's settings that files have.
_SETTINGS = ("image_mean", "image_std", "resample", "min_pixels", "max_pixels")
#: The padding token by the text model's type, and CLIP's mean and deviation.
_PADDING = {
    "gemma2": "<unused0>",
    "llama": "<|reserved_special_token_0|>",
    "qwen2": "<|image_pad|>",
}
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
#: Indicators of `modulm_ovis.ovis`.
_START, _PREFIX, _COLUMN, _ROW, _END = -1, -2, -3, -4, -5
#: SigLIP's.
_HALF = [0.5, 0.5, 0.5]


class OvisFamily(MediaFamily):
    """Ovis 2: tiles, separated by tokens. The encoder embeds all tokens of the placeholder."""

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.config["image_token_id"]), *self.config["visual_indicator_token_ids"])

    def tensors(self, outputs: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        tokens = np.asarray(outputs["input_ids"][0], dtype=np.int64)
        return {"pixel_values": np.asarray(outputs["pixel_values"]), "tokens": tokens}


@frozen(eq=False, kw_only=True)
class OvisProcessor:
    """Cuts images into parts of a grid, for a tokenizer with the padding token.

    side: pixels along a part, padded to a square. token: the padding token's id. count: tokens of a
    part.
    """

    tokenizer: Any
    side: int
    token: int
    count: int
    mean: Sequence[float]
    std: Sequence[float]

    @property
    def chat_template(self) -> Any:
        """The tokenizer's."""
        return self.tokenizer.chat_template

    def parts(
        self, image: Image, most: int, threshold: float
    ) -> tuple[np.ndarray, tuple[int, int]]:
        """([parts, 3, side, side] float32, the whole first if several; (rows, columns))."""
        image = image.convert("RGB")
        grid = self._best(image.size, most, threshold)
        boxes = _boxes(image.size, grid)
        views = [image.crop(box) for box in boxes]
        views = [image, *views] if len(views) > 1 else views
        return np.stack([self._square(view) for view in views]), grid

    def _best(self, size: tuple[int, int], most: int, threshold: float) -> tuple[int, int]:
        """The smallest grid whose parts keep enough of the pixels, or the one that keeps most."""
        grids = []
        for rows in range(1, most + 1):
            for columns in range(1, most // rows + 1):
                boxes = _boxes(size, (rows, columns))
                kept = sum(_kept(box, self.side) for box in boxes) / (size[0] * size[1])
                grids.append(((rows, columns), kept))
        good = [pair for pair in grids if pair[1] > threshold]
        if good:
            return min(good, key=lambda pair: (pair[0][0] * pair[0][1], -pair[1]))[0]
        return min(grids, key=lambda pair: (-pair[1], pair[0][0] * pair[0][1]))[0]

    def _square(self, image: Image) -> np.ndarray:
        """[3, side, side]: the longer side fills the square; the rest is 0 after normalization."""
        width, height, side = *image.size, self.side
        if width >= height:
            size = (side, max(int(height / width * side), 1))
        else:
            size = (max(int(width / height * side), 1), side)
        pixels = np.asarray(image.resize(size, resample=3), dtype=np.float32) / 255
        normal = (pixels - np.float32(self.mean)) / np.float32(self.std)
        square = np.zeros((side, side, 3), np.float32)
        left, top = (side - size[0]) // 2, (side - size[1]) // 2
        square[top : top + size[1], left : left + size[0]] = normal
        return np.ascontiguousarray(square.transpose(2, 0, 1))


def _boxes(size: tuple[int, int], grid: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """(left, top, right, bottom) of the parts of an image of (width, height), row by row."""
    (width, height), (rows, columns) = size, grid
    lefts = [column * (width // columns) for column in range(columns)] + [width]
    tops = [row * (height // rows) for row in range(rows)] + [height]
    return [
        (lefts[column], tops[row], lefts[column + 1], tops[row + 1])
        for row in range(rows) for column in range(columns)
    ]  # fmt: skip


def _kept(box: tuple[int, int, int, int], side: int) -> float:
    """Pixels of a part when its longer side is at most `side`."""
    long, short = sorted((box[2] - box[0], box[3] - box[1]), reverse=True)
    return side * (short / long * side) if long > side else long * short


class OvisPublishedFamily(MediaFamily):
    """Ovis 2 as published: all tokens of an image are padding, which the encoder embeds."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        config, written = files.table("config"), files.settings("image_processor")
        text = config.get("llm_config") or config.get("text_config") or {}
        token = _PADDING.get(str(text.get("model_type")))
        if token is None:
            raise ValueError(
                f"llm_config.model_type: not supported yet: {text.get('model_type')!r}"
            )
        tokenizer = files.part("tokenizer")
        number = tokenizer.convert_tokens_to_ids(token)
        if number is None or number == tokenizer.unk_token_id:
            raise ValueError(f"its tokenizer has no token {token}")
        vision = config.get("visual_tokenizer_config") or {}
        inner = vision.get("backbone_config") or {}
        side = int(inner.get("image_size", 448))
        row = -(-(side // int(inner.get("patch_size", 14))) // int(vision.get("hidden_stride", 2)))
        return OvisProcessor(
            tokenizer=tokenizer, side=side, token=int(number), count=row * row,
            mean=written.get("image_mean", _CLIP[0]), std=written.get("image_std", _CLIP[1]),
        )  # fmt: skip

    def mark(self, kind: str) -> str:
        return "<image>"

    def features(self, kind: str) -> Sequence[int]:
        return (self.processor.token,)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        names = ("max_partition", "covering_threshold")
        if unknown := [name for name in options if name not in names]:
            raise ValueError(f"{unknown[0]}: this model's processor has no such option")
        most, threshold = int(options.get(names[0], 9)), float(options.get(names[1], 0.9))
        pixels, (rows, columns) = self.processor.parts(media.value, most, threshold)
        part = [0] * self.processor.count
        tokens = [_START, *part, _PREFIX]
        if rows * columns > 1:
            line = [token for _ in range(columns) for token in (*part, _COLUMN)][:-1]
            tokens += [token for _ in range(rows) for token in (*line, _ROW)][:-1]
        tokens.append(_END)
        ids = [[self.processor.token] * len(tokens)]
        return {"pixel_values": pixels, "tokens": np.array(tokens), "input_ids": ids}


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
