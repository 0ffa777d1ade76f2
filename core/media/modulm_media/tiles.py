"""Image processors of families for which transformers has only those that need torchvision.

What they do is the same, with its classes for plain arrays.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.processing_utils import ImagesKwargs

__all__ = [
    "Cohere2VisionImageProcessorPil",
    "Llama4ImageProcessorPil",
    "Phi4MultimodalImageProcessorPil",
]


def _shapes(most: int) -> np.ndarray:
    """[n, 2], rows and columns of every way to lay out at most so many tiles, fewest first."""
    found = [(h, w) for w in range(1, most + 1) for h in range(1, most // w + 1)]
    return np.array(sorted(found, key=lambda shape: shape[0] * shape[1]))


class Cohere2VisionImageProcessorPil(GotOcr2ImageProcessorPil):  # type: ignore[misc]
    """Command A Vision: as many tiles as enlarge the image least, and a small one of all."""

    size = {"height": 512, "width": 512}  # noqa: RUF012
    crop_to_patches = True
    patch_size = 16

    def crop_image_to_patches(
        self,
        image: np.ndarray,
        min_patches: int,
        max_patches: int,
        use_thumbnail: bool = True,
        patch_size: Any = None,
        resample: Any = None,
    ) -> list[np.ndarray]:
        """image: [channels, height, width] -> tiles of `patch_size`."""
        side, shapes = patch_size.height, _shapes(max_patches)
        scales = (shapes * side / np.array(image.shape[-2:])).min(1)
        fits = scales >= 1
        best = np.where(fits, scales, np.inf).argmin() if fits.any() else scales.argmax()
        rows, columns = (int(n) for n in shapes[best])
        whole = self.resize(image, SizeDict(height=side * rows, width=side * columns), resample)
        tiles = _split(whole, rows, columns)
        if use_thumbnail and len(tiles) > 1:
            tiles.append(self.resize(image, patch_size, resample))
        return tiles


class _Llama4Keywords(ImagesKwargs, total=False):  # type: ignore[misc, call-arg]
    max_patches: int
    resize_to_max_canvas: bool


class Llama4ImageProcessorPil(PilBackend):  # type: ignore[misc]
    """Llama 4: the canvas of tiles that the image fits best, padded below and to the right."""

    valid_kwargs = _Llama4Keywords
    resample = PILImageResampling.BILINEAR
    image_mean = [0.5, 0.5, 0.5]  # noqa: RUF012
    image_std = [0.5, 0.5, 0.5]  # noqa: RUF012
    size = {"height": 336, "width": 336}  # noqa: RUF012
    do_resize = True
    do_rescale = True
    do_normalize = True
    do_convert_rgb = True
    max_patches = 16
    resize_to_max_canvas = False

    def _preprocess(
        self,
        images: list[np.ndarray],
        size: Any,
        resample: Any,
        do_rescale: bool,
        rescale_factor: float,
        do_normalize: bool,
        image_mean: Any,
        image_std: Any,
        return_tensors: Any,
        max_patches: int,
        resize_to_max_canvas: bool,
        **more: Any,
    ) -> BatchFeature:
        """images: [channels, height, width] each -> the tiles of all, and rows and columns."""

        def numbers(pixels: np.ndarray) -> np.ndarray:
            found = torch.from_numpy(pixels)
            if do_rescale:
                found = found.to(torch.bfloat16) * rescale_factor
            if do_normalize:
                mean, std = (torch.tensor(t, dtype=found.dtype) for t in (image_mean, image_std))
                found = (found - mean[:, None, None]) / std[:, None, None]
            return found.float().numpy()

        tiles: list[np.ndarray] = []
        grids = []
        for image in images:
            canvas = _canvas(image.shape[-2:], size.height, max_patches, resize_to_max_canvas)
            most = canvas
            if not resize_to_max_canvas:
                sides = zip(image.shape[-2:], canvas, strict=True)
                most = tuple(min(max(own, size.height), side) for own, side in sides)
            height, width = _within(image.shape[-2:], most)
            kept = self.resize(image, SizeDict(height=height, width=width), resample)
            padded = np.zeros((len(image), *canvas), kept.dtype)
            padded[:, :height, :width] = kept
            rows, columns = (side // size.height for side in canvas)
            tiles += _split(numbers(padded), rows, columns)
            if rows * columns > 1:
                tiles.append(numbers(self.resize(image, size, resample)))
            grids.append([rows, columns])
        data = {"pixel_values": tiles, "aspect_ratios": grids}
        return BatchFeature(data=data, tensor_type=return_tensors)


class _PhiKeywords(ImagesKwargs, total=False):  # type: ignore[misc, call-arg]
    patch_size: int
    dynamic_hd: int


class Phi4MultimodalImageProcessorPil(PilBackend):  # type: ignore[misc]
    """Phi-4 multimodal: tiles, white below or to the right of the image, and a small copy of it.

    dynamic_hd: the most tiles.
    """

    valid_kwargs = _PhiKeywords
    resample = PILImageResampling.BICUBIC
    image_mean = [0.5, 0.5, 0.5]  # noqa: RUF012
    image_std = [0.5, 0.5, 0.5]  # noqa: RUF012
    size = {"height": 448, "width": 448}  # noqa: RUF012
    do_rescale = True
    do_normalize = True
    do_convert_rgb = True
    patch_size = 14
    dynamic_hd = 36
    model_input_names = ["image_pixel_values", "image_sizes", "image_attention_mask"]  # noqa: RUF012

    def _preprocess(
        self,
        images: list[np.ndarray],
        size: Any,
        resample: Any,
        do_rescale: bool,
        rescale_factor: float,
        do_normalize: bool,
        image_mean: Any,
        image_std: Any,
        return_tensors: Any,
        patch_size: int,
        dynamic_hd: int,
        **more: Any,
    ) -> BatchFeature:
        """images: [channels, height, width] each -> the copy and the tiles of each, as many as of
        the image with most, which patches of them are the image's, and the tokens of each.
        """
        mode = "bicubic" if resample == PILImageResampling.BICUBIC else "bilinear"
        side = size.height
        tiles, masks, counts, sizes = [], [], [], []
        for image in images:
            canvas, kept = _phi_canvas(image.shape[-2:], side, dynamic_hd)
            small = self.resize(image, SizeDict(*kept), PILImageResampling.BILINEAR)
            padded = np.full((len(image), *canvas), 255, small.dtype)
            padded[:, : kept[0], : kept[1]] = small
            pixels = torch.from_numpy(padded).float()
            if do_rescale:
                pixels = pixels * rescale_factor
            if do_normalize:
                mean, std = (torch.tensor(t)[:, None, None] for t in (image_mean, image_std))
                pixels = (pixels - mean) / std
            copy = F.interpolate(pixels[None], (side, side), mode=mode, align_corners=False)
            rows, columns = (length // side for length in canvas)
            tiles.append(np.stack([copy[0].numpy(), *_split(pixels.numpy(), rows, columns)]))
            filled = _phi_filled(canvas, kept, patch_size)
            whole = np.ones((side // patch_size, side // patch_size), np.float32)
            masks.append(np.stack([whole, *(t[0] for t in _split(filled[None], rows, columns))]))
            counts.append(_phi_tokens(masks[-1][1:], rows, columns))
            sizes.append(canvas)
        most = max(map(len, tiles))
        data = {
            "image_pixel_values": np.stack([_filled_up(own, most, 0) for own in tiles]),
            "image_sizes": np.array(sizes, np.int64),
            "image_attention_mask": np.stack([_filled_up(own, most, 1) for own in masks]),
            "num_img_tokens": counts,
        }
        return BatchFeature(data=data, tensor_type=return_tensors)


def _filled_up(tiles: np.ndarray, most: int, value: float) -> np.ndarray:
    """tiles: [n, ...] -> [most, ...]."""
    rest = np.full((most - len(tiles), *tiles.shape[1:]), value, tiles.dtype)
    return np.concatenate([tiles, rest])


def _phi_filled(canvas: tuple[int, int], kept: tuple[int, int], patch: int) -> np.ndarray:
    """[rows, columns] float32 of patches, 1 for those that show any of the image."""
    found = np.zeros([length // patch for length in canvas], np.float32)
    rows, columns = (
        length // patch - (length - own) // patch for length, own in zip(canvas, kept, strict=True)
    )
    found[:rows, :columns] = 1
    return found


def _phi_canvas(
    image: tuple[int, ...], side: int, most: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(height, width) of the tiles, and of the image in them."""
    height, width = image
    rows, columns = -(-height // side), -(-width // side)
    if rows * columns > most:
        wanted, best = width / height, math.inf
        for i, j in _shapes(most).tolist():
            apart, roomy = abs(wanted - j / i), 2 * height * width > side * side * i * j
            if apart < best or (apart == best and roomy):
                best, rows, columns = apart, i, j
    high, wide = side * rows, side * columns
    scales = wide / width, high / height
    if scales[0] < scales[1]:
        kept = int(height * scales[0]), wide
    else:
        kept = high, int(width * scales[1])
    if min(*kept) < 10:
        raise ValueError(f"the image is too narrow: {width} by {height}")
    return (high, wide), kept


def _phi_tokens(masks: np.ndarray, rows: int, columns: int) -> int:
    """The tokens of an image: a square of patches each, one at the end of each row, one between the
    tiles and the copy. masks: [rows * columns, patches, patches] of the tiles.
    """
    cut = masks[:, ::2, ::2]
    side = int(cut.shape[1])
    joined = cut.reshape(rows, columns, side, side).swapaxes(1, 2)
    squares = joined.reshape(rows * side, columns * side)
    return int(squares.sum()) + int(squares[:, 0].sum()) + 1 + side * side + side


def _canvas(image: tuple[int, ...], side: int, most: int, largest: bool) -> tuple[int, int]:
    """(height, width) of tiles that the image is enlarged least for, or reduced least."""
    shapes = _shapes(most) * side
    scales = (shapes / np.array(image)).astype(np.float32).min(1)
    fits = scales[scales >= 1]
    chosen = (fits.max() if largest else fits.min()) if len(fits) else scales.max()
    height, width = shapes[scales == chosen][0].tolist()
    return height, width


def _within(image: tuple[int, ...], most: tuple[int, ...]) -> tuple[int, int]:
    """The largest (height, width) of the image's shape."""
    (height, width), (high, wide) = image, most
    if wide / width < high / height:
        return max(min(int(height * (wide / width)), high), 1), wide
    return high, max(min(int(width * (high / height)), wide), 1)


def _split(image: np.ndarray, rows: int, columns: int) -> list[np.ndarray]:
    """Its tiles, row by row."""
    return [
        tile for row in np.split(image, rows, axis=1) for tile in np.split(row, columns, axis=2)
    ]
