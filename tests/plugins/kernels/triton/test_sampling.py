"""Choosing tokens: as the twins do, whatever the filters find near the best logit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from modulm.ops import sampling_twins as twins

V = 300


def logits_of(rows, device, size=V, spread=3.0, seed=0):
    return (torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * spread).to(
        device
    )


def knobs(rows, device, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    numbers = (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
    )
    return tuple(each.to(device) for each in numbers)


FILTERS = [
    (0, 1.0, 0.0), (1, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.5, 0.0), (0, 0.999, 0.0), (0, 1.0, 0.1),
    (20, 0.8, 0.05), (V + 5, 0.9, 0.0), (0, 1e-9, 0.0), (0, 1.0, 1.0), (200, 0.9, 1e-6),
]  # fmt: skip


@pytest.mark.parametrize("most", [256, 16], ids=["near the best", "in the whole row"])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
def test_filters_keep_what_the_twin_keeps(ops, device, monkeypatch, top_k, top_p, min_p, most):
    from modulm_kernels_triton import sampling

    monkeypatch.setattr(sampling, "_CANDIDATES", most)
    x = logits_of(3, device)
    x[1] *= 0.02  # all within a hair of the best
    x[2, 5:9] = x[2].max()  # equals
    numbers = knobs(3, device, 0.8, top_k, top_p, min_p)
    actual = ops["filter_logits"](x, *numbers)
    wanted = twins.filter_logits(x, *numbers)
    assert torch.equal(actual.isfinite(), wanted.isfinite())
    torch.testing.assert_close(actual, wanted)


def test_tokens_are_those_of_the_twin(ops, device):
    rows = 24
    x = logits_of(rows, device)
    x[3], x[4, 7], x[5] = torch.nan, torch.inf, -torch.inf
    x[6, ::2] = -torch.inf
    numbers = [each.clone() for each in knobs(rows, device)]
    numbers[0][::5] = 0.0
    numbers[1][6:12] = 9
    numbers[2][9:18] = 0.7
    numbers[3][15:20] = 0.02
    positions = np.arange(rows)
    uniform = torch.from_numpy(twins.uniforms(positions * 7, positions)).to(device)
    uniform[1], uniform[2] = 0.0, 1 - 2**-53
    tokens = ops["sample_blind"](x, *numbers, uniform)
    assert torch.equal(tokens, twins.sample(x, *numbers, uniform))
    assert tokens[[3, 4, 5]].tolist() == [-1, -1, -1]
    off = ops["sample_blind"](x, numbers[0], None, None, None, uniform)
    plain = knobs(rows, device)
    assert torch.equal(off, twins.sample(x, numbers[0], *plain[1:], uniform))
    one = slice(17, 18)
    single = ops["sample"](x[one], *(each[one] for each in numbers), uniform[one])
    assert torch.equal(single, tokens[one])


def test_a_large_vocabulary_goes_by_blocks(ops, device):
    x = logits_of(2, device, 9000, 1.0)
    numbers = knobs(2, device, 1.0, 0, 0.9)
    uniform = torch.tensor([0.3, 0.97], dtype=torch.float64).to(device)
    tokens = ops["sample_blind"](x, numbers[0], None, numbers[2], None, uniform)
    assert torch.equal(tokens, twins.sample(x, *numbers, uniform))
    tokens = ops["sample_blind"](x, numbers[0], None, None, None, uniform)
    assert torch.equal(tokens, twins.sample(x, *knobs(2, device), uniform))


def test_draws_follow_the_probabilities(ops, device):
    x = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).repeat(100, 1).to(device)
    uniform = ((torch.arange(100) + 0.5) / 100).double().to(device)
    tokens = ops["sample_blind"](x, torch.ones(100).to(device), None, None, None, uniform)
    shares = tokens.bincount(minlength=4) / 100
    torch.testing.assert_close(shares, x[0].softmax(-1), atol=1.1e-2, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_first_of_the_best(ops, device, dtype):
    x = torch.zeros(4, 5000, dtype=dtype, device=device)
    x[0, 17] = x[0, 5] = x[0, 4500] = 2
    x[1, 4999] = 1
    x[2, 1] = torch.nan
    assert ops["argmax"](x).tolist() == [5, 4999, -1, 0]


def test_penalties_and_masks(ops, device):
    x = logits_of(4, device)
    mine, theirs = x.clone(), x.clone()
    entry_rows = torch.tensor([0, 0, 2, 3]).to(device)
    ids = torch.tensor([5, 299, 7, 0]).to(device)
    counts = torch.tensor([0.0, 2.0, 1.0, 3.0]).to(device)
    numbers = [
        torch.tensor(each).to(device) for each in ([1.3, 1.3, 0.5, 1.0], [0.1] * 4, [0.4] * 4)
    ]
    ops["apply_penalties"](mine, entry_rows, ids, counts, *numbers)
    twins.apply_penalties(theirs, entry_rows, ids, counts, *numbers)
    torch.testing.assert_close(mine, theirs)
    assert not torch.equal(mine, x)
    generator = torch.Generator().manual_seed(1)
    mask = torch.randint(-(2**31), 2**31, (2, 10), dtype=torch.int32, generator=generator).to(
        device
    )
    rows = torch.tensor([3, 1]).to(device)
    ops["apply_bitmask"](mine, rows, mask)
    twins.apply_bitmask(theirs, rows, mask)
    assert torch.equal(mine.isinf(), theirs.isinf())
    assert mine.isinf().any()
    with pytest.raises(ValueError, match="mask must be"):
        ops["apply_bitmask"](mine, rows, mask[:, :9])


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("k", [0, 3])
def test_the_best_beside_the_chosen(ops, device, normalise, k):
    x = logits_of(5, device)
    chosen = torch.tensor([0, 5, 299, 7, 7]).to(device)
    actual = ops["top_logprobs"](x, chosen, k, normalise)
    wanted = twins.top_logprobs(x, chosen, k, normalise)
    assert torch.equal(actual[0], wanted[0])
    assert torch.equal(actual[2], wanted[2])
    torch.testing.assert_close(actual[1], wanted[1], rtol=1e-5, atol=1e-5)
