"""Granite Speech's spectrogram where there is no torchaudio: as its formula says."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from modulm_granite.processor import SpeechProcessor
from modulm_towers.testing import sounds


def processor(**table):
    tokenizer = SimpleNamespace(convert_tokens_to_ids=lambda token: 7)
    return SpeechProcessor(tokenizer, table)


def mels(bins):
    """[bins, 257], triangles that are even on the HTK scale (torchaudio's `melscale_fbanks`)."""
    ends = torch.linspace(0, 2595 * np.log10(1 + 8000 / 700), bins + 2)
    points = 700 * (10 ** (ends / 2595) - 1)
    slopes = points - torch.linspace(0, 8000, 257)[:, None]
    down = -slopes[:, :-2] / (points[1:-1] - points[:-2])
    up = slopes[:, 2:] / (points[2:] - points[1:-1])
    return torch.minimum(down, up).clamp(min=0).T


@pytest.mark.parametrize("seconds", [0.3, 0.2501])
def test_spectrogram(seconds):
    (sound,) = sounds((seconds,))
    spectrogram = processor(n_mels=80)._spectrogram(sound)
    window = torch.hann_window(400)
    power = (
        torch.stft(
            torch.from_numpy(sound), 512, 160, 400, window, center=True, return_complex=True
        ).abs()
        ** 2
    )
    loud = (mels(80) @ power).T.clamp(min=1e-10).log10()
    levels = torch.maximum(loud, loud.max() - 8) / 4 + 1
    expected = levels[: len(levels) // 2 * 2].reshape(-1, 160)
    assert (spectrogram.shape, spectrogram.dtype) == (tuple(expected.shape), np.float32)
    assert np.abs(spectrogram - expected.numpy()).max() < 1e-4


def test_what_it_refuses():
    speech_processor = processor()
    with pytest.raises(ValueError, match="8000 samples"):
        speech_processor(["a"], sampling_rate=8000)
    with pytest.raises(ValueError, match="device: no such keyword"):
        speech_processor(["a"], device="cpu")
    with pytest.raises(ValueError, match="2 placeholders for 1 audio items"):
        speech_processor(["<|audio|><|audio|>"], [np.zeros(1600, np.float32)])
