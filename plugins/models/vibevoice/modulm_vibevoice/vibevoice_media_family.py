"""Media family of VibeVoice ASR, whose conversations name the length of their sounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modulm.errors import RequestError
from modulm_media import Media, MediaFamily, Sound

__all__ = ["VibeVoiceAsrFamily"]


class VibeVoiceAsrFamily(MediaFamily):
    """VibeVoice ASR."""

    kinds = ("audio",)

    def group_media(
        self, tokens: np.ndarray, media: Sequence[Media], options: Mapping[str, Any]
    ) -> tuple[np.ndarray, Sequence[Media]]:
        """Write the seconds of sounds where the chat template has a token for them."""
        mark, tokenizer = self.processor.audio_duration_token, self.processor.tokenizer
        text = tokenizer.decode(tokens.tolist()) if media else ""
        if mark not in text:
            return tokens, media
        first, *others = text.split(mark)
        if len(others) > len(media):
            raise RequestError(
                f"{len(others)} times {mark} for {len(media)} sounds", "multi_modal_data"
            )
        pairs = zip(media, others, strict=False)
        text = first + "".join(f"{self._seconds(one):.2f}{rest}" for one, rest in pairs)
        return np.array(tokenizer.encode(text, add_special_tokens=False), np.int64), media

    def needs_values(self, options: Mapping[str, Any]) -> bool:
        return False

    def _seconds(self, media: Media) -> float:
        if isinstance(media.value, Sound):
            return media.value.seconds
        if media.processed is None:
            raise RequestError("a sound whose length is written must be sent", "multi_modal_data")
        return float(media.processed.tensors["padding_mask"].sum()) / self.rate
