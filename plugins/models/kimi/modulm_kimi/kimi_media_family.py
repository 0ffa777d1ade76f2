"""Media families of Kimi-VL and Kimi K2.5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from modulm_kimi.processor import open_processor
from modulm_media import Media, MediaFamily

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["KimiK25Family", "KimiVLFamily"]


class KimiVLFamily(MediaFamily):
    """Kimi-VL: uses the processor's output unchanged."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        return open_processor(files)


class KimiK25Family(KimiVLFamily):
    """Kimi K2.5: a video is a sequence of short clips, each preceded by its time."""

    kinds = ("image", "video")

    def features(self, kind: str) -> Sequence[int]:
        """A video token outside of the vocabulary is replaced by the image token."""
        tokens = super().features(kind)
        vocabulary = self.config.get("text_config", {}).get("vocab_size")
        return tokens if vocabulary is None or tokens[0] < vocabulary else super().features("image")

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        token = getattr(self.processor, f"{media.kind}_token_id")
        if token is None or token == self.processor.tokenizer.unk_token_id:
            raise ValueError(f"its tokenizer has no token {self.mark(media.kind)}")
        outputs = super().call(media, options)
        tokens = np.asarray(outputs["input_ids"])
        (feature_token,) = self.features(media.kind)
        return {**outputs, "input_ids": np.where(tokens == token, feature_token, tokens)}
