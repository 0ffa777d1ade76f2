"""Media family of Parakeet: a token of the prompt for each frame of the encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from attrs import frozen

from modulm.errors import RequestError
from modulm_media import Media, MediaFamily, Processed, Sound

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["ParakeetFamily"]

#: The token that stands for a sound. The model reads no tokens, so any will do.
_MARK = 0


@frozen(eq=False)
class Hearing:
    """transformers' feature extractor."""

    feature_extractor: Any


class ParakeetFamily(MediaFamily):
    """Sounds become spectrograms; prompts have nothing else."""

    kinds: ClassVar[tuple[str, ...]] = ("audio",)

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

    def mark(self, kind: str) -> str:
        return "<audio>"

    def mark_tokens(self, kind: str) -> Sequence[int] | None:
        return (_MARK,)

    def features(self, kind: str) -> Sequence[int]:
        return (_MARK,)

    def process(self, media: Media, options: Mapping[str, Any]) -> Processed:
        if not isinstance(media.value, Sound):
            raise RequestError(f"the model does not support {media.kind} input", "multi_modal_data")
        samples = media.value.at(self.rate).samples
        try:
            heard = self.processor.feature_extractor(
                [samples], sampling_rate=self.rate, return_tensors="np", **options
            )
        except Exception as error:
            message = f"the model's processor rejected this audio: {error}"
            raise RequestError(message[:300], "multi_modal_data") from error
        mel = heard["input_features"][0, : int(heard["attention_mask"].sum())]
        encoder = self.config.get("encoder_config") or {}
        frames, factor = len(mel), int(encoder.get("subsampling_factor", 8))
        while factor > 1:
            frames, factor = (frames + 1) // 2, factor // 2
        most = int(encoder.get("max_position_embeddings", 5000))
        if not 0 < frames <= most:
            raise RequestError(
                f"audio of {frames} frames: the model accepts 1 to {most}; "
                "/v1/audio/transcriptions splits longer audio",
                "multi_modal_data",
            )
        tokens = np.full(frames, _MARK, dtype=np.int64)
        mel = np.ascontiguousarray(mel, np.float32)
        return Processed("audio", tokens, np.ones(frames, dtype=bool), {"mel": mel})
