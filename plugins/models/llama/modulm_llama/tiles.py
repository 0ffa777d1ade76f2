"""The image processor of Llama 4 without torchvision, which transformers' own requires.

Computes the same on numpy arrays, with transformers' classes for these.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs

from modulm_media.tiles import shapes, split

__all__ = ["Llama4ImageProcessorPil"]


class _Llama4Keywords(ImagesKwargs, total=False):  # type: ignore[misc, call-arg]
    max_patches: int
    resize_to_max_canvas: bool


class Llama4ImageProcessorPil(PilBackend):  # type: ignore[misc]
    """Llama 4: the best-fitting canvas of tiles, padded at the bottom and right."""

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
        """images: [channels, height, width] each -> the tiles of all, their rows and columns."""

        def numbers(pixels: np.ndarray) -> np.ndarray:
            values = torch.from_numpy(pixels)
            if do_rescale:
                values = values.to(torch.bfloat16) * rescale_factor
            if do_normalize:
                mean, std = (torch.tensor(t, dtype=values.dtype) for t in (image_mean, image_std))
                values = (values - mean[:, None, None]) / std[:, None, None]
            return values.float().numpy()

        tiles: list[np.ndarray] = []
        grids = []
        for image in images:
            canvas = _canvas(image.shape[-2:], size.height, max_patches, resize_to_max_canvas)
            most = canvas
            if not resize_to_max_canvas:
                sides = zip(image.shape[-2:], canvas, strict=True)
                most = tuple(min(max(minimum, size.height), side) for minimum, side in sides)
            height, width = _within(image.shape[-2:], most)
            resized = self.resize(image, SizeDict(height=height, width=width), resample)
            padded = np.zeros((len(image), *canvas), resized.dtype)
            padded[:, :height, :width] = resized
            rows, columns = (side // size.height for side in canvas)
            tiles += split(numbers(padded), rows, columns)
            if rows * columns > 1:
                tiles.append(numbers(self.resize(image, size, resample)))
            grids.append([rows, columns])
        data = {"pixel_values": tiles, "aspect_ratios": grids}
        return BatchFeature(data=data, tensor_type=return_tensors)


def _canvas(image: tuple[int, ...], side: int, most: int, largest: bool) -> tuple[int, int]:
    """(height, width) of the canvas of tiles that enlarges the image least, or reduces it least."""
    layouts = shapes(most) * side
    scales = (layouts / np.array(image)).astype(np.float32).min(1)
    fits = scales[scales >= 1]
    chosen = (fits.max() if largest else fits.min()) if len(fits) else scales.max()
    height, width = layouts[scales == chosen][0].tolist()
    return height, width


def _within(image: tuple[int, ...], most: tuple[int, ...]) -> tuple[int, int]:
    """The largest (height, width) within `most` with the image's aspect ratio."""
    (height, width), (high, wide) = image, most
    if wide / width < high / height:
        return max(min(int(height * (wide / width)), high), 1), wide
    return high, max(min(int(width * (high / height)), wide), 1)
