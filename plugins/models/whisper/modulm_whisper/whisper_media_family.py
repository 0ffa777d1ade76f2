"""Media family of Whisper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import numpy as np

from modulm.errors import RequestError
from modulm_media import Media, MediaFamily, Processed
from modulm_media.values import Sound

__all__ = ["WhisperFamily"]


class WhisperFamily(MediaFamily):
    """The prompt is the start of the decoder's text; 30 seconds of audio go to the encoder."""

    kinds: ClassVar[tuple[str, ...]] = ("audio",)
    crosses: ClassVar[bool] = True

    def process(self, media: Media, options: Mapping[str, Any]) -> Processed:
        sound = cast("Sound", media.value).at(self.rate)
        hears = self.processor.feature_extractor
        if len(sound.samples) > hears.n_samples:
            raise RequestError(
                f"audio of {sound.seconds:.1f} seconds: the model accepts "
                f"{hears.chunk_length}; /v1/audio/transcriptions splits longer audio",
                "multi_modal_data",
            )
        try:
            features = hears(sound.samples, sampling_rate=self.rate, return_tensors="np", **options)
        except Exception as error:
            message = f"the model's processor rejected this audio: {error}"
            raise RequestError(message[:300], "multi_modal_data") from error
        mel = np.asarray(features["input_features"], dtype=np.float32)
        nothing = np.zeros(0, dtype=np.int64)
        # The second convolution halves the time.
        outputs = mel.shape[-1] // 2
        return Processed(
            "audio", nothing, nothing.astype(bool), {"mel": mel[0]}, encoder_outputs=outputs
        )
