"""Prompts of T5: the prompt is the encoder's input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from modulm.errors import RequestError
from modulm_media import MediaFamily, Processed
from modulm_t5.limits import LONGEST

__all__ = ["TextFamily"]


class TextFamily(MediaFamily):
    """T5, FLAN-T5, mT5 and UMT5."""

    kinds: ClassVar[tuple[str, ...]] = ("text",)
    crosses: ClassVar[bool] = True
    reads_text: ClassVar[bool] = True

    def start(self) -> Sequence[int]:
        return super().start() or [int(self.config.get("pad_token_id") or 0)]

    def text(self, tokens: np.ndarray) -> Processed:
        most = self.config.get("n_positions", LONGEST)
        if len(tokens) > most:
            raise RequestError(f"{len(tokens)} tokens: the encoder reads at most {most}", "prompt")
        return super().text(tokens)
