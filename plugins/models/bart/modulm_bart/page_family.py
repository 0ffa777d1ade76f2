"""Pages of Nemotron Parse: one image, which the encoder reads; the prompt begins the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
from attrs import frozen

from modulm.errors import RequestError
from modulm_media import Media, MediaFamily, Processed

if TYPE_CHECKING:
    from PIL.Image import Image

    from modulm_media.processors import ProcessorFiles

__all__ = ["PageFamily", "PageProcessor"]

#: CLIP's.
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
#: Columns of patches that are one token.
_COLUMNS = 4


@frozen(eq=False, kw_only=True)
class PageProcessor:
    """Shrinks pages that are too large, and centers them on white. height, width: in pixels."""

    tokenizer: Any
    height: int
    width: int
    patch: int

    @property
    def chat_template(self) -> Any:
        """The tokenizer's."""
        return self.tokenizer.chat_template

    @property
    def tokens(self) -> int:
        """Encoder outputs of a page."""
        return self.height // self.patch * (self.width // self.patch // _COLUMNS) + 1

    def patches(self, image: Image) -> np.ndarray:
        """[patches, 3 * patch * patch] float32, row by row."""
        pixels = np.asarray(image.convert("RGB"))
        height, width = pixels.shape[:2]
        shape = width / height
        rows, columns = height, width
        if rows > self.height:
            rows, columns = self.height, max(int(self.height * shape), 1)
        if columns > self.width:
            rows, columns = max(int(self.width / shape), 1), self.width
        if (rows, columns) != (height, width):
            pixels = _shrunk(pixels, rows, columns)
        page = np.full((self.height, self.width, 3), 255, np.uint8)
        top, left = (self.height - rows) // 2, (self.width - columns) // 2
        page[top : top + rows, left : left + columns] = pixels
        normal = (page.astype(np.float32) / 255 - np.float32(_MEAN)) / np.float32(_STD)
        step = self.patch
        cut = normal.reshape(self.height // step, step, self.width // step, step, 3)
        return np.ascontiguousarray(cut.transpose(0, 2, 4, 1, 3)).reshape(-1, 3 * step**2)


def _shrunk(pixels: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Interpolate bilinearly between the nearest pixels: [rows, columns, 3] uint8."""
    import torch

    tensor = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[None].float()
    size = (rows, columns)
    resized = torch.nn.functional.interpolate(tensor, size, mode="bilinear", align_corners=False)
    whole: np.ndarray = resized[0].round().permute(1, 2, 0).to(torch.uint8).numpy()
    return whole


class PageFamily(MediaFamily):
    """Nemotron Parse."""

    crosses: ClassVar[bool] = True

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        config = files.table("config")
        height, width = config.get("image_size") or (2048, 1664)
        patch = int((config.get("encoder") or {}).get("patch_size", 16))
        return PageProcessor(
            tokenizer=files.part("tokenizer"), height=int(height), width=int(width), patch=patch
        )

    def mark(self, kind: str) -> str:
        return ""

    def start(self) -> Sequence[int]:
        decoder = self.config.get("decoder") or {}
        first = self.config.get("decoder_start_token_id", decoder.get("decoder_start_token_id"))
        return [first] if isinstance(first, int) else super().start()

    def process(self, media: Media, options: Mapping[str, Any]) -> Processed:
        if options:
            message = f"{next(iter(options))}: this model's processor takes no options"
            raise RequestError(message, "multi_modal_data")
        pixels = self.processor.patches(cast("Any", media.value))
        nothing = np.zeros(0, dtype=np.int64)
        tensors, count = {"pixel_values": pixels}, self.processor.tokens
        return Processed("image", nothing, nothing.astype(bool), tensors, encoder_outputs=count)
