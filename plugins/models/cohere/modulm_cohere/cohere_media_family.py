"""Media families of Aya Vision and Command A Vision (tiles and a thumbnail per image), and of
Cohere Transcribe and Canary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from modulm.errors import RequestError
from modulm_media import Media, MediaFamily, Processed
from modulm_media.spectrogram_family import SpectrogramFamily

__all__ = ["AyaVisionFamily", "CanaryFamily", "CohereAsrFamily"]


class AyaVisionFamily(MediaFamily):
    """Uses the processor's output unchanged."""


class CohereAsrFamily(SpectrogramFamily):
    """The prompt is the start of the decoder's text; a sound goes to the encoder."""

    crosses: ClassVar[bool] = True
    extractor: ClassVar[str] = "CohereAsrFeatureExtractor"
    settings: ClassVar[tuple[str, ...]] = (
        "feature_size", "sampling_rate", "hop_length", "n_fft", "win_length", "preemphasis",
        "dither", "max_audio_clip_s", "overlap_chunk_second",
    )  # fmt: skip

    @property
    def longest(self) -> float:
        """The most seconds of a sound."""
        return float(self.processor.feature_extractor.max_audio_clip_s)

    def process(self, media: Media, options: Mapping[str, Any]) -> Processed:
        sound = self.sound(media)
        if sound.seconds > self.longest:
            raise RequestError(
                f"audio of {sound.seconds:.1f} seconds: the model accepts "
                f"{self.longest:.0f}; /v1/audio/transcriptions splits longer audio",
                "multi_modal_data",
            )
        mel, outputs = self.spectrogram(sound, options)
        if not outputs:
            raise RequestError("audio of less than a frame", "multi_modal_data")
        nothing = np.zeros(0, dtype=np.int64)
        return Processed(
            "audio", nothing, nothing.astype(bool), {"mel": mel}, encoder_outputs=outputs
        )


class CanaryFamily(CohereAsrFamily):
    """The same with NVIDIA's spectrogram, for as many frames as the encoder has positions."""

    extractor: ClassVar[str] = "ParakeetFeatureExtractor"
    settings: ClassVar[tuple[str, ...]] = SpectrogramFamily.settings

    @property
    def longest(self) -> float:
        frames = self.encoder.get("max_position_embeddings", 5000)
        per_frame = self.processor.feature_extractor.hop_length / self.rate
        return float(frames * self.encoder.get("subsampling_factor", 8) * per_frame)
