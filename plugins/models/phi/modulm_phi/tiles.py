"""The image processor of Phi-4 multimodal without torchvision, which transformers' own requires.

Computes the same on numpy arrays, with transformers' classes for these.
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
from transformers.processing_utils import ImagesKwargs

from modulm_media.tiles import shapes, split

__all__ = ["Phi4MultimodalImageProcessorPil"]


class _PhiKeywords(ImagesKwargs, total=False):  # type: ignore[misc, call-arg]
    patch_size: int
    dynamic_hd: int


class Phi4MultimodalImageProcessorPil(PilBackend):  # type: ignore[misc]
    """Phi-4 multimodal: tiles padded with white at the bottom or right, and a thumbnail.

    dynamic_hd: maximum number of tiles.
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
        """images: [channels, height, width] each -> the thumbnail and tiles of each, padded to the
        same number, masks of their real patches, and token counts.
        """
        mode = "bicubic" if resample == PILImageResampling.BICUBIC else "bilinear"
        side = size.height
        tiles, masks, counts, sizes = [], [], [], []
        for image in images:
            canvas, content = _canvas(image.shape[-2:], side, dynamic_hd)
            small = self.resize(image, SizeDict(*content), PILImageResampling.BILINEAR)
            padded = np.full((len(image), *canvas), 255, small.dtype)
            padded[:, : content[0], : content[1]] = small
            pixels = torch.from_numpy(padded).float()
            if do_rescale:
                pixels = pixels * rescale_factor
            if do_normalize:
                mean, std = (torch.tensor(t)[:, None, None] for t in (image_mean, image_std))
                pixels = (pixels - mean) / std
            copy = F.interpolate(pixels[None], (side, side), mode=mode, align_corners=False)
            rows, columns = (length // side for length in canvas)
            tiles.append(np.stack([copy[0].numpy(), *split(pixels.numpy(), rows, columns)]))
            filled = _filled(canvas, content, patch_size)
            whole = np.ones((side // patch_size, side // patch_size), np.float32)
            masks.append(np.stack([whole, *(t[0] for t in split(filled[None], rows, columns))]))
            counts.append(_tokens(masks[-1][1:], rows, columns))
            sizes.append(canvas)
        most = max(map(len, tiles))
        data = {
            "image_pixel_values": np.stack([_filled_up(item, most, 0) for item in tiles]),
            "image_sizes": np.array(sizes, np.int64),
            "image_attention_mask": np.stack([_filled_up(item, most, 1) for item in masks]),
            "num_img_tokens": counts,
        }
        return BatchFeature(data=data, tensor_type=return_tensors)


def _filled_up(tiles: np.ndarray, most: int, value: float) -> np.ndarray:
    """tiles: [n, ...] -> [most, ...]."""
    rest = np.full((most - len(tiles), *tiles.shape[1:]), value, tiles.dtype)
    return np.concatenate([tiles, rest])


def _filled(canvas: tuple[int, int], content: tuple[int, int], patch: int) -> np.ndarray:
    """[rows, columns] float32 of patches: 1 for those with any part of the image."""
    mask = np.zeros([length // patch for length in canvas], np.float32)
    rows, columns = (
        length // patch - (length - used) // patch
        for length, used in zip(canvas, content, strict=True)
    )
    mask[:rows, :columns] = 1
    return mask


def _canvas(
    image: tuple[int, ...], side: int, most: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(height, width) of the tiles together, and of the image within them."""
    height, width = image
    rows, columns = -(-height // side), -(-width // side)
    if rows * columns > most:
        wanted, best = width / height, math.inf
        for i, j in shapes(most).tolist():
            apart, roomy = abs(wanted - j / i), 2 * height * width > side * side * i * j
            if apart < best or (apart == best and roomy):
                best, rows, columns = apart, i, j
    high, wide = side * rows, side * columns
    scales = wide / width, high / height
    if scales[0] < scales[1]:
        content = int(height * scales[0]), wide
    else:
        content = high, int(width * scales[1])
    if min(*content) < 10:
        raise ValueError(f"the image is too narrow: {width} by {height}")
    return (high, wide), content


def _tokens(masks: np.ndarray, rows: int, columns: int) -> int:
    """The number of tokens: one per merged square of patches, one per row end, and a separator.

    masks: [rows * columns, patches, patches] of the tiles.
    """
    cut = masks[:, ::2, ::2]
    side = int(cut.shape[1])
    joined = cut.reshape(rows, columns, side, side).swapaxes(1, 2)
    squares = joined.reshape(rows * side, columns * side)
    return int(squares.sum()) + int(squares[:, 0].sum()) + 1 + side * side + side
