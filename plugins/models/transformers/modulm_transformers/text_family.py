"""Prompts of encoder-decoders run by transformers: the prompt is the encoder's input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from modulm_media import MediaFamily

__all__ = ["TEXT", "TextFamily"]

#: The name of the media family.
TEXT = "transformers_text"


class TextFamily(MediaFamily):
    """Encoder-decoders of texts; the maximum length is that of the engine."""

    kinds: ClassVar[tuple[str, ...]] = ("text",)
    crosses: ClassVar[bool] = True
    reads_text: ClassVar[bool] = True

    def start(self) -> Sequence[int]:
        return super().start() or [int(self.config.get("pad_token_id") or 0)]
