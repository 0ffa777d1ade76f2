"""Spectrograms that torchaudio and Kaldi make, with the functions of transformers.

torchaudio is not required: it must fit the installed torch.
"""

from __future__ import annotations

import numpy as np

__all__ = ["decibel_mels", "kaldi_mels"]

#: Kaldi's windows of 25 ms every 10 ms, at 16 kHz.
_RATE, _LENGTH, _HOP, _FFT = 16000, 400, 160, 512
#: Kaldi's lowest frequency in Hz, its emphasis of high ones, and the least energy.
_LOW, _EMPHASIS, _FLOOR = 20.0, 0.97, 1.192092955078125e-07


def kaldi_mels(samples: np.ndarray, *, bins: int = 80, window: str = "povey") -> np.ndarray:
    """Return Kaldi's log mel energies without dither: [frames, bins] float32.

    samples: [n] at 16 kHz, in the scale of the caller. window: "povey" or "hamming". Raises
    ValueError for less than 25 ms.
    """
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    if len(samples) < _LENGTH:
        raise ValueError("sound of less than 25 ms")
    filters = mel_filter_bank(
        num_frequency_bins=_FFT // 2 + 1, num_mel_filters=bins, min_frequency=_LOW,
        max_frequency=_RATE / 2, sampling_rate=_RATE, norm=None, mel_scale="kaldi",
        triangularize_in_mel_space=True,
    )  # fmt: skip
    energies = spectrogram(
        np.asarray(samples, np.float32), window_function(_LENGTH, window, periodic=False),
        frame_length=_LENGTH, hop_length=_HOP, fft_length=_FFT, power=2.0, center=False,
        preemphasis=_EMPHASIS, remove_dc_offset=True, mel_filters=filters, mel_floor=_FLOOR,
        log_mel="log",
    )  # fmt: skip
    frames: np.ndarray = np.ascontiguousarray(energies.T, np.float32)
    return frames


def decibel_mels(
    samples: np.ndarray,
    *,
    rate: int,
    bins: int,
    fft: int,
    length: int,
    hop: int,
    low: float,
    high: float,
    loudness: float,
    center: bool = True,
) -> np.ndarray:
    """Return torchaudio's mel spectrogram (HTK's scale) in decibels: [bins, frames] float32.

    length: samples of the Hann window. low, high: frequencies in Hz. loudness: decibels below the
    maximum to which values are clipped.
    """
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    filters = mel_filter_bank(
        num_frequency_bins=fft // 2 + 1, num_mel_filters=bins, min_frequency=low,
        max_frequency=high, sampling_rate=rate, norm=None, mel_scale="htk",
    )  # fmt: skip
    levels = spectrogram(
        np.asarray(samples, np.float32), window_function(length, "hann"),
        frame_length=length, hop_length=hop, fft_length=fft, power=2.0, center=center,
        mel_filters=filters, mel_floor=1e-10, log_mel="dB", min_value=1e-10, db_range=loudness,
    )  # fmt: skip
    return np.asarray(levels, np.float32)
