"""Media families of Fun-ASR Nano, whose processors need torchaudio: the same without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from attrs import frozen

from modulm.errors import RequestError
from modulm_media import Media, MediaFamily, Sound
from modulm_media.spectra import kaldi_mels

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["FunAsrFamily", "FunAsrNanoFamily"]

_RATE = 16000


@frozen(eq=False)
class Frames:
    """The tokenizer, and how spectrograms are made: `stacked` frames every `stride` frames are one
    input. gain: factor of samples.
    """

    tokenizer: Any
    bins: int = 80
    stacked: int = 7
    stride: int = 6
    window: str = "hamming"
    gain: float = 1.0

    def inputs(self, samples: np.ndarray) -> np.ndarray:
        """[n] at 16 kHz -> [inputs, bins * stacked] float32. Raises ValueError for short sounds."""
        mel = kaldi_mels(samples * self.gain, bins=self.bins, window=self.window)
        firsts = np.arange(0, len(mel), self.stride) - (self.stacked - 1) // 2
        frames = np.clip(firsts[:, None] + np.arange(self.stacked), 0, len(mel) - 1)
        return mel[frames].reshape(len(firsts), -1)


class FunAsrNanoFamily(MediaFamily):
    """Fun-ASR Nano in transformers' format."""

    kinds = ("audio",)
    token: ClassVar[str] = "<|object_ref_start|>"

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        written = files.settings("feature_extractor")
        names = {
            "feature_size": "bins", "num_frames_lfr": "stacked", "stride_lfr": "stride",
            "window": "window",
        }  # fmt: skip
        _refuse(written, {"frame_length": 25, "frame_shift": 10, "sampling_rate": _RATE})
        settings = {ours: written[key] for key, ours in names.items() if key in written}
        return Frames(files.part("tokenizer"), **settings)

    @property
    def rate(self) -> int:
        return _RATE

    def mark(self, kind: str) -> str:
        return self.token

    def features(self, kind: str) -> Sequence[int]:
        number = self.config.get("audio_token_id")
        if number is None:
            number = self.processor.tokenizer.convert_tokens_to_ids(self.token)
        return (int(number),)

    def count(self, inputs: int) -> int:
        """Tokens for a number of inputs."""
        return inputs

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if options:
            raise ValueError(f"{', '.join(options)}: no such keyword")
        if not isinstance(media.value, Sound):
            raise RequestError(f"the model does not support {media.kind} input", "multi_modal_data")
        inputs = self.processor.inputs(media.value.at(_RATE).samples)
        count = self.count(len(inputs))
        return {
            "input_ids": [list(self.features(media.kind)) * count],
            "input_features": inputs,
            "tokens": np.array([count], np.int64),
        }


class FunAsrFamily(FunAsrNanoFamily):
    """Fun-ASR Nano with FunASR's files: a token for eight inputs."""

    token = "<|AUDIO|>"

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        written = files.settings("feature_extractor").get("frontend_conf") or {}
        names = {"n_mels": "bins", "lfr_m": "stacked", "lfr_n": "stride", "window": "window"}
        _refuse(
            written,
            {
                "frame_length": 25, "frame_shift": 10, "fs": _RATE, "cmvn_file": None,
                "snip_edges": True,
            },
        )  # fmt: skip
        settings = {ours: written[key] for key, ours in names.items() if key in written}
        gain = 32768.0 if written.get("upsacle_samples", True) else 1.0
        return Frames(files.part("tokenizer"), gain=gain, **settings)

    def count(self, inputs: int) -> int:
        for _ in range(2):
            inputs = 1 + (inputs - 1) // 2
        return max(1, (inputs - 1) // 2 + 1)


def _refuse(written: Mapping[str, Any], supported: Mapping[str, Any]) -> None:
    """Raise ValueError for settings of spectrograms that are not supported."""
    for key, value in supported.items():
        if written.get(key, value) != value:
            raise ValueError(f"{key}: {written[key]!r} is not supported, only {value!r}")
