"""Media family of Ultravox, whose processor is code in its files: the same without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from modulm.errors import RequestError
from modulm_media import Media, MediaFamily, Sound

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["UltravoxFamily"]

_MARK = "<|audio|>"


@frozen(eq=False)
class Hearing:
    """The tokenizer and Whisper's feature extractor."""

    tokenizer: Any
    feature_extractor: Any


class UltravoxFamily(MediaFamily):
    """Ultravox: windows of Whisper's length, the last of a long sound filled with zeros."""

    kinds = ("audio",)

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        from transformers import WhisperFeatureExtractor

        written = files.settings("feature_extractor")
        audio = files.table("config").get("audio_config") or {}
        settings = {"feature_size": int(audio.get("num_mel_bins", 80)), "chunk_length": 30}
        known = ("feature_size", "sampling_rate", "hop_length", "chunk_length", "n_fft")
        settings |= {key: written[key] for key in known if key in written}
        return Hearing(files.part("tokenizer"), WhisperFeatureExtractor(**settings))

    def mark(self, kind: str) -> str:
        return _MARK

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.config.get("audio_token_index", 32000)),)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if options:
            raise ValueError(f"{', '.join(options)}: no such keyword")
        if not isinstance(media.value, Sound):
            raise RequestError(f"the model does not support {media.kind} input", "multi_modal_data")
        extractor = self.processor.feature_extractor
        outputs = extractor(
            media.value.at(self.rate).samples, sampling_rate=self.rate, padding="longest",
            pad_to_multiple_of=extractor.hop_length, truncation=False, return_tensors="np",
        )  # fmt: skip
        mel = outputs["input_features"][0]
        context = 2 * int((self.config.get("audio_config") or {}).get("max_source_positions", 1500))
        count = -(-mel.shape[1] // context)
        frames = [min(context, mel.shape[1] - first * context) for first in range(count)]
        width = context if count > 1 else mel.shape[1]
        padded = np.pad(mel, ((0, 0), (0, count * width - mel.shape[1])))
        merged = 2 * int(self.config.get("stack_factor", 8))
        tokens = sum(-(-n // merged) for n in frames)
        return {
            "input_ids": [list(self.features(media.kind)) * tokens],
            "input_features": padded.reshape(len(mel), count, width).transpose(1, 0, 2),
            "frames": np.array(frames, np.int64),
        }
