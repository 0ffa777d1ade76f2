"""Media families of Aya Vision and Command A Vision (tiles and a thumbnail per image), and of
Cohere Transcribe and Canary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from attrs import frozen

from modulm.errors import RequestError
from modulm_media import Media, MediaFamily, Processed, Sound

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["AyaVisionFamily", "CanaryFamily", "CohereAsrFamily"]


class AyaVisionFamily(MediaFamily):
    """Uses the processor's output unchanged."""


@frozen(eq=False)
class Hearing:
    """transformers' feature extractor."""

    feature_extractor: Any


class CohereAsrFamily(MediaFamily):
    """The prompt is the start of the decoder's text; a sound goes to the encoder."""

    kinds: ClassVar[tuple[str, ...]] = ("audio",)
    crosses: ClassVar[bool] = True

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        from transformers import CohereAsrFeatureExtractor

        written = files.settings("feature_extractor")
        known = (
            "feature_size", "sampling_rate", "hop_length", "n_fft", "win_length", "preemphasis",
            "dither", "max_audio_clip_s", "overlap_chunk_second",
        )  # fmt: skip
        settings = {key: written[key] for key in known if key in written}
        return Hearing(CohereAsrFeatureExtractor(**settings))

    @property
    def longest(self) -> float:
        """The most seconds of a sound."""
        return float(self.processor.feature_extractor.max_audio_clip_s)

    def process(self, media: Media, options: Mapping[str, Any]) -> Processed:
        if not isinstance(media.value, Sound):
            raise RequestError(f"the model does not support {media.kind} input", "multi_modal_data")
        sound, extractor = media.value.at(self.rate), self.processor.feature_extractor
        if sound.seconds > self.longest:
            raise RequestError(
                f"audio of {sound.seconds:.1f} seconds: the model accepts "
                f"{self.longest:.0f}; /v1/audio/transcriptions splits longer audio",
                "multi_modal_data",
            )
        try:
            heard = extractor(
                [sound.samples], sampling_rate=self.rate, return_tensors="np", **options
            )
        except Exception as error:
            message = f"the model's processor rejected this audio: {error}"
            raise RequestError(message[:300], "multi_modal_data") from error
        mel = heard["input_features"][0, : int(heard["attention_mask"].sum())]
        factor = int((self.config.get("encoder_config") or {}).get("subsampling_factor", 8))
        nothing = np.zeros(0, dtype=np.int64)
        outputs = len(mel)
        while factor > 1:
            outputs, factor = (outputs + 1) // 2, factor // 2
        if not outputs:
            raise RequestError("audio of less than a frame", "multi_modal_data")
        return Processed(
            "audio", nothing, nothing.astype(bool), {"mel": np.ascontiguousarray(mel, np.float32)},
            encoder_outputs=outputs,
        )  # fmt: skip


class CanaryFamily(CohereAsrFamily):
    """The same with NVIDIA's spectrogram, for as many frames as the encoder has positions."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        from transformers import ParakeetFeatureExtractor

        written = files.settings("feature_extractor")
        known = (
            "feature_size", "sampling_rate", "hop_length", "n_fft", "win_length", "preemphasis",
            "padding_value",
        )  # fmt: skip
        settings = {key: written[key] for key in known if key in written}
        return Hearing(ParakeetFeatureExtractor(**settings))

    @property
    def longest(self) -> float:
        encoder = self.config.get("encoder_config") or {}
        frames = encoder.get("max_position_embeddings", 5000)
        per_frame = self.processor.feature_extractor.hop_length / self.rate
        return float(frames * encoder.get("subsampling_factor", 8) * per_frame)
