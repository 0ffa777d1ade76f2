"""Prompts of encoder-decoder text models: the prompt is the encoder's input."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from modulm.errors import RequestError
from modulm_media import MediaFamily, Processed

__all__ = ["TextFamily"]


class TextFamily(MediaFamily):
    """BART, mBART, M2M100, NLLB and Marian."""

    kinds: ClassVar[tuple[str, ...]] = ("text",)
    crosses: ClassVar[bool] = True
    reads_text: ClassVar[bool] = True

    def text(self, tokens: np.ndarray) -> Processed:
        most = self.config.get("max_position_embeddings")
        if isinstance(most, int) and len(tokens) > most:
            raise RequestError(f"{len(tokens)} tokens: the encoder reads at most {most}", "prompt")
        return super().text(tokens)
