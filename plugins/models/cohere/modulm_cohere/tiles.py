"""The image processor of Command A Vision without torchvision, which transformers' own requires.

Computes the same on numpy arrays, with transformers' classes for these.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers.image_utils import SizeDict
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from modulm_media.tiles import shapes, split

__all__ = ["Cohere2VisionImageProcessorPil"]


class Cohere2VisionImageProcessorPil(GotOcr2ImageProcessorPil):  # type: ignore[misc]
    """Command A Vision: the tiling that enlarges the image least, plus a thumbnail."""

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
        side, layouts = patch_size.height, shapes(max_patches)
        scales = (layouts * side / np.array(image.shape[-2:])).min(1)
        fits = scales >= 1
        best = np.where(fits, scales, np.inf).argmin() if fits.any() else scales.argmax()
        rows, columns = (int(n) for n in layouts[best])
        whole = self.resize(image, SizeDict(height=side * rows, width=side * columns), resample)
        tiles = split(whole, rows, columns)
        if use_thumbnail and len(tiles) > 1:
            tiles.append(self.resize(image, patch_size, resample))
        return tiles
