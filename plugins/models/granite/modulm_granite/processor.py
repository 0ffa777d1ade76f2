"""Granite Speech's processor without torchaudio, which transformers' own requires.

The spectrogram uses transformers' functions for other models: power of 400 samples every 160
samples, in bins of the HTK mel scale, as logarithms clipped to 80 dB below the maximum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

__all__ = ["SpeechProcessor"]


class SpeechProcessor:
    """The part of transformers' `GraniteSpeechProcessor` that prompts need. table: of its feature
    extractor.
    """

    def __init__(self, tokenizer: Any, table: Mapping[str, Any], token: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.audio_token = token or getattr(tokenizer, "audio_token", None) or "<|audio|>"
        self.audio_token_id = tokenizer.convert_tokens_to_ids(self.audio_token)
        mel = {**table, **table.get("melspec_kwargs", {})}
        self._rate = int(mel.get("sample_rate", mel.get("sampling_rate", 16000)))
        self._fft, self._length = int(mel.get("n_fft", 512)), int(mel.get("win_length", 400))
        self._hop, self._bins = int(mel.get("hop_length", 160)), int(mel.get("n_mels", 80))
        self._window = int(table.get("projector_window_size", 15))
        self._rest = int(table.get("projector_downsample_rate", 5))

    def __call__(
        self,
        text: Sequence[str],
        audio: Sequence[np.ndarray] | None = None,
        *,
        sampling_rate: int | None = None,
        return_tensors: str | None = None,
        add_special_tokens: bool = True,
        **options: Any,
    ) -> dict[str, Any]:
        """Return the tensors of a text with its sounds, like transformers' class.

        Several sounds are padded to one length. Raises ValueError.
        """
        if options:
            raise ValueError(f"{', '.join(options)}: no such keyword")
        if sampling_rate not in (None, self._rate):
            raise ValueError(f"audio with {sampling_rate} samples per second, not {self._rate}")
        (prompt,) = text
        features: dict[str, Any] = {}
        if audio is not None:
            import torch

            first, *others = prompt.split(self.audio_token)
            if len(others) != len(audio):
                raise ValueError(f"{len(others)} placeholders for {len(audio)} audio items")
            mel = np.stack([self._spectrogram(one) for one in audio])
            count = -(-mel.shape[1] // self._window) * (self._window // self._rest)
            features = {
                "input_features": torch.from_numpy(mel),
                "input_features_mask": torch.ones(len(mel), count, dtype=torch.bool),
            }
            prompt = first + "".join(self.audio_token * count + rest for rest in others)
        read = self.tokenizer(
            [prompt], add_special_tokens=add_special_tokens, return_tensors=return_tensors
        )
        return {**read, **features}

    def _spectrogram(self, samples: np.ndarray) -> np.ndarray:
        """[n] samples -> [frames / 2, 2 * bins] float32."""
        from transformers.audio_utils import spectrogram, window_function

        power = spectrogram(
            np.asarray(samples, np.float32), window_function(self._length, "hann"),
            frame_length=self._length, hop_length=self._hop, fft_length=self._fft, power=2.0,
            mel_filters=self._filters, mel_floor=1e-10,
        )  # fmt: skip
        loud = np.log10(np.maximum(power.T, 1e-10))
        levels = np.maximum(loud, loud.max() - 8.0) / 4 + 1
        levels = levels[: len(levels) // 2 * 2].astype(np.float32)
        frames: np.ndarray = levels.reshape(-1, 2 * self._bins)
        return frames

    @cached_property
    def _filters(self) -> np.ndarray:
        from transformers.audio_utils import mel_filter_bank

        filters: np.ndarray = mel_filter_bank(
            num_frequency_bins=self._fft // 2 + 1, num_mel_filters=self._bins, min_frequency=0.0,
            max_frequency=self._rate / 2, sampling_rate=self._rate, norm=None, mel_scale="htk",
        )  # fmt: skip
        return filters
