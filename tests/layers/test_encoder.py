"""Attention within whole texts: layers with a window compute long texts piece by piece."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from modulm_layers.encoder import attend_rows, segments


def batch(lengths, **extras):
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return SimpleNamespace(query_starts=starts, tokens=torch.zeros(int(starts[-1])), extras=extras)


def plain(q, k, v, lengths, window):
    """The same for one text after the other, with all scores."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    results = []
    for q_, k_, v_ in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        at = torch.arange(len(q_))
        scores = torch.einsum("qhd,khd->hqk", q_, k_) / q.shape[-1] ** 0.5
        scores = scores.masked_fill((at[:, None] - at).abs() > window, -torch.inf)
        results.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v_))
    return torch.cat(results)


@pytest.mark.parametrize("window", [1, 100, 300])
@pytest.mark.parametrize("lengths", [[600, 590, 40], [257], [256, 33]])
def test_windows_of_long_texts(lengths, window):
    generator = torch.Generator().manual_seed(len(lengths))
    owners = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    q, k, v = (torch.randn(sum(lengths), heads, 16, generator=generator) for heads in (4, 2, 2))
    expected = plain(q, k, v, lengths, window)
    for rows in (segments(batch(lengths), 16), segments(batch(lengths, token_rows=owners))):
        result = attend_rows(q, k, v, rows, window=window)
        assert torch.allclose(result, expected, atol=1e-5)


def test_a_text_has_the_same_bits_beside_others():
    q, k, v = torch.randn(3, 1000, 4, 16, generator=torch.Generator().manual_seed(0))
    alone = attend_rows(q[:600], k[:600], v[:600], segments(batch([600]), 16), window=50)
    beside = attend_rows(q, k, v, segments(batch([600, 400]), 16), window=50)
    assert torch.equal(alone, beside[:600])
