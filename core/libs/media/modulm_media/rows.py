"""Pixtral's processor without torchvision, which transformers' own module requires.

Images go through transformers' image processor. This class writes their tokens into the text: one
row of tokens per row of patches, a break token after each row, an end token after the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from modulm_media.family import MediaFamily

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["RowsFamily", "RowsProcessor"]


class RowsFamily(MediaFamily):
    """Media family of models whose files may name Pixtral's processor."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        from modulm_media.processors import takes_video

        if takes_video() or "PixtralProcessor" not in files.names:
            return super().open_processor(files)
        tokenizer, images = files.part("tokenizer"), files.part("image_processor")
        return RowsProcessor(tokenizer, images, files.table("processor_config"))


class RowsProcessor:
    """The part of transformers' `PixtralProcessor` that prompts need."""

    def __init__(self, tokenizer: Any, images: Any, table: Mapping[str, Any]) -> None:
        self.tokenizer, self.image_processor = tokenizer, images
        self.image_token = str(table.get("image_token", "[IMG]"))
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self._break = str(table.get("image_break_token", "[IMG_BREAK]"))
        self._end = str(table.get("image_end_token", "[IMG_END]"))
        self._patch = int(table.get("patch_size", 16)) * int(table.get("spatial_merge_size", 1))

    def __call__(
        self,
        text: Sequence[str],
        images: Sequence[Any] | None = None,
        *,
        return_tensors: str | None = None,
        add_special_tokens: bool = True,
        **options: Any,
    ) -> dict[str, Any]:
        """Return the tensors of a text with its images, like transformers' class."""
        (prompt,) = text
        image_inputs: dict[str, Any] = {}
        if images is not None:
            image_inputs = dict(
                self.image_processor(
                    list(images), patch_size=self._patch, return_tensors=return_tensors, **options
                )
            )
            first, *others = prompt.split(self.image_token)
            if len(others) != len(images):
                raise ValueError(f"{len(others)} placeholders for {len(images)} images")
            sizes = [[int(side) for side in size] for size in image_inputs["image_sizes"]]
            pairs = zip(sizes, others, strict=True)
            prompt = first + "".join(self._rows(*size) + rest for size, rest in pairs)
        encoded = self.tokenizer(
            [prompt], add_special_tokens=add_special_tokens, return_tensors=return_tensors
        )
        return {**encoded, **image_inputs}

    def _rows(self, height: int, width: int) -> str:
        rows = [self.image_token * (width // self._patch)] * (height // self._patch)
        return self._break.join(rows) + self._end
