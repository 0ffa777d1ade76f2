"""Media family of Parakeet: a token of the prompt for each frame of the encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from modulm.errors import RequestError
from modulm_media import Media, Processed
from modulm_media.spectrogram_family import SpectrogramFamily

__all__ = ["ParakeetFamily"]

#: The token that stands for a sound. The model reads no tokens, so any will do.
_MARK = 0


class ParakeetFamily(SpectrogramFamily):
    """Sounds become spectrograms; prompts have nothing else."""

    extractor: ClassVar[str] = "ParakeetFeatureExtractor"

    def mark(self, kind: str) -> str:
        return "<audio>"

    def mark_tokens(self, kind: str) -> Sequence[int] | None:
        return (_MARK,)

    def features(self, kind: str) -> Sequence[int]:
        return (_MARK,)

    def process(self, media: Media, options: Mapping[str, Any]) -> Processed:
        mel, frames = self.spectrogram(self.sound(media), options)
        most = int(self.encoder.get("max_position_embeddings", 5000))
        if not 0 < frames <= most:
            raise RequestError(
                f"audio of {frames} frames: the model accepts 1 to {most}; "
                "/v1/audio/transcriptions splits longer audio",
                "multi_modal_data",
            )
        tokens = np.full(frames, _MARK, dtype=np.int64)
        return Processed("audio", tokens, np.ones(frames, dtype=bool), {"mel": mel})
