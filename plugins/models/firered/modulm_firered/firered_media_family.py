"""Media families of FireRedASR 2 and FireRedLID.

They read Kaldi's spectrogram, normalized by the checkpoint's numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from attrs import frozen

from modulm.errors import RequestError
from modulm_media import Media, MediaFamily, Processed, Sound
from modulm_media.spectra import kaldi_mels

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["FireRedFamily", "FireRedLidFamily"]

_MARK, _RATE, _GAIN = "<|AUDIO|>", 16000, 32768.0


@frozen(eq=False)
class Frames:
    """The tokenizer, and how spectrograms are made. means, scales: [bins]."""

    tokenizer: Any
    bins: int
    means: np.ndarray
    scales: np.ndarray

    def inputs(self, samples: np.ndarray) -> np.ndarray:
        """[n] at 16 kHz -> [frames, bins] float32. Raises ValueError for short sounds."""
        mel = kaldi_mels(samples * _GAIN, bins=self.bins)
        return ((mel - self.means) * self.scales).astype(np.float32)


class FireRedFamily(MediaFamily):
    """FireRedASR 2."""

    kinds = ("audio",)

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        written = files.settings("feature_extractor")
        for key, value in (("frame_length", 25), ("frame_shift", 10), ("sampling_rate", _RATE)):
            if written.get(key, value) != value:
                raise ValueError(f"{key}: {written[key]!r} is not supported, only {value}")
        bins = int(written.get("num_mel_bins", 80))
        numbers = [written.get(key) for key in ("means", "inverse_std_variences")]
        means, scales = (np.asarray(some, np.float64) for some in numbers)
        if means.shape != (bins,) or scales.shape != (bins,):
            raise ValueError(f"means, inverse_std_variences: {bins} numbers each are expected")
        return Frames(files.part("tokenizer"), bins, means, scales)

    @property
    def rate(self) -> int:
        return _RATE

    def mark(self, kind: str) -> str:
        return _MARK

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.processor.tokenizer.convert_tokens_to_ids(_MARK)),)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if options:
            raise ValueError(f"{', '.join(options)}: no such keyword")
        if not isinstance(media.value, Sound):
            raise RequestError(f"the model does not support {media.kind} input", "multi_modal_data")
        frames = self.processor.inputs(media.value.at(_RATE).samples)
        count = -(-len(frames) // 4) // int(self.config.get("encoder_downsample_rate", 2))
        if not count:
            raise ValueError("sound of less than a tenth of a second")
        return {
            "input_ids": [list(self.features(media.kind)) * count],
            "input_features": frames,
        }


class FireRedLidFamily(FireRedFamily):
    """FireRedLID: the prompt is the start of an answer; a sound goes to the encoder."""

    crosses: ClassVar[bool] = True

    def process(self, media: Media, options: Mapping[str, Any]) -> Processed:
        if options:
            raise RequestError(f"{', '.join(options)}: no such keyword", "mm_processor_kwargs")
        if not isinstance(media.value, Sound):
            raise RequestError(f"the model does not support {media.kind} input", "multi_modal_data")
        try:
            frames = self.processor.inputs(media.value.at(_RATE).samples)
        except ValueError as error:
            message = f"the model's processor rejected this audio: {error}"
            raise RequestError(message, "multi_modal_data") from error
        nothing = np.zeros(0, dtype=np.int64)
        return Processed(
            "audio", nothing, nothing.astype(bool), {"input_features": frames},
            encoder_outputs=-(-len(frames) // 4),
        )  # fmt: skip
