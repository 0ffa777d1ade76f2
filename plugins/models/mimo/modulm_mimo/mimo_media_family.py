"""Media family of MiDashengLM, which needs no processor's code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from modulm.errors import RequestError
from modulm_media import Media, MediaFamily, Sound
from modulm_media.spectra import decibel_mels

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["MiDashengFamily"]

_MARK = "<|AUDIO|>"
#: Samples of a sound at least; silence fills shorter ones.
_LEAST = 3200
#: Decibels below the maximum to which spectrograms are clipped.
_LOUDNESS = 120.0


class MiDashengFamily(MediaFamily):
    """MiDashengLM: the settings of spectrograms are those of its encoder."""

    kinds = ("audio",)

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        return files.part("tokenizer")

    def mark(self, kind: str) -> str:
        return _MARK

    def document(self, kind: str, is_only_item: bool) -> str:
        return f"<|audio_bos|>{_MARK}<|audio_eos|>"

    def features(self, kind: str) -> Sequence[int]:
        number = self.config.get("audio_token_id")
        return (int(self.processor.convert_tokens_to_ids(_MARK) if number is None else number),)

    @property
    def rate(self) -> int:
        return int(self._settings.get("sample_rate", 16000))

    @property
    def _settings(self) -> Mapping[str, Any]:
        settings: Mapping[str, Any] = self.config.get("audio_encoder_config") or {}
        return settings

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if options:
            raise ValueError(f"{', '.join(options)}: no such keyword")
        if not isinstance(media.value, Sound):
            raise RequestError(f"the model does not support {media.kind} input", "multi_modal_data")
        samples, c = media.value.at(self.rate).samples, self._settings
        samples = np.pad(samples, (0, max(0, _LEAST - len(samples))))
        hop = int(c.get("hop_length", 160))
        mel = decibel_mels(
            samples, rate=self.rate, bins=int(c.get("n_mels", 64)), fft=int(c.get("n_fft", 512)),
            length=int(c.get("win_length", 512)), hop=hop, low=float(c.get("f_min", 0.0)),
            high=float(c.get("f_max", 8000.0)), loudness=_LOUDNESS,
            center=bool(c.get("center", True)),
        )  # fmt: skip
        size, stride = (_pair(c.get(key, 16)) for key in ("patch_size", "patch_stride"))
        rows, columns = (
            (length - kernel) // step + 1
            for length, kernel, step in zip(mel.shape, size, stride, strict=True)
        )
        count = rows * columns // int(self.config.get("subsample_factor", 5))
        return {
            "input_ids": [list(self.features(media.kind)) * count],
            "input_features": mel,
            "samples": np.array([len(samples)], np.int64),
        }


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))
