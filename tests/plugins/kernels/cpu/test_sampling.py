"""Sampling against its twins."""

from __future__ import annotations

import pytest
import torch

from modulm.ops import sampling_twins as twins

SIZES = (1, 5, 16, 1000, 10001)
SETTINGS = {
    "plain": (1.0, 0, 1.0, 0.0),
    "greedy": (0.0, 3, 0.5, 0.1),
    "hot": (2.5, 0, 1.0, 0.0),
    "top-k": (0.8, 7, 1.0, 0.0),
    "top-k 1": (0.8, 1, 1.0, 0.0),
    "top-p": (1.1, 0, 0.7, 0.0),
    "top-p 0": (1.1, 0, 0.0, 0.0),
    "min-p": (1.0, 0, 1.0, 0.2),
    "all": (0.9, 40, 0.9, 0.05),
}


def arguments(rows, temperature, top_k, top_p, min_p):
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.rand(rows, dtype=torch.float64),
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_argmax(ops, size, dtype):
    logits = (torch.randn(9, size + 3) * 3).to(dtype)[:, :size].round()
    logits[1] = -torch.inf
    logits[2, size // 2] = torch.nan
    logits[3, size - 1] = torch.inf
    logits[4, : size - 1] = -torch.inf
    assert torch.equal(ops["argmax"](logits), twins.argmax(logits))
    assert ops["argmax"](logits[:0]).shape == (0,)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_sample(ops, size, setting):
    rows = 64
    logits = torch.randn(rows, size + 2)[:, :size] * 2
    logits[0, size // 3 :] = -torch.inf
    logits[1, 0] = torch.nan
    logits[2] = logits[2].round()
    arguments_of_rows = arguments(rows, *SETTINGS[setting])
    before = logits.clone()
    mine, theirs = (
        ops["sample"](logits, *arguments_of_rows),
        twins.sample(logits, *arguments_of_rows),
    )
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    # A draw that falls on a boundary between two tokens may go to either, by rounding.
    for row in (mine != theirs).nonzero().flatten().tolist():
        some = [x[row : row + 1] for x in (logits, *arguments_of_rows)]
        shifted = [
            twins.sample(*some[:-1], (some[-1] + step).clamp(0, 1 - 1e-9)) for step in (-1e-5, 1e-5)
        ]
        assert int(mine[row]) in [int(x) for x in shifted]
    assert (mine != theirs).sum() <= 1


def test_sampled_tokens_follow_the_distribution(ops):
    logits = torch.randn(20)
    rows = 20000
    drawn = ops["sample"](logits.expand(rows, -1).contiguous(), *arguments(rows, 1.0, 0, 0.8, 0.0))
    filtered = twins.filter_logits(
        logits[None], *(x[:1] for x in arguments(1, 1.0, 0, 0.8, 0.0)[:-1])
    )
    wanted = filtered.softmax(-1)[0]
    frequencies = torch.bincount(drawn, minlength=20) / rows
    assert (frequencies - wanted).abs().max() < 0.02


def test_penalties(ops):
    mine = torch.randn(5, 100)
    theirs = mine.clone()
    flat = torch.randperm(500)[:80]
    entry_rows, ids = flat // 100, flat % 100
    rest = (torch.randint(3, (80,)).float(), torch.rand(80) + 0.5, torch.rand(80), torch.rand(80))
    ops["apply_penalties"](mine, entry_rows, ids, *rest)
    twins.apply_penalties(theirs, entry_rows, ids, *rest)
    torch.testing.assert_close(mine, theirs)
    with pytest.raises(ValueError, match="^ids must lie"):
        ops["apply_penalties"](mine, entry_rows, ids + 100, *rest)


@pytest.mark.parametrize("size", [1, 31, 64, 100])
def test_bitmask(ops, size):
    mine = torch.randn(6, size)
    theirs = mine.clone()
    entry_rows = torch.tensor([4, 0, 5])
    mask = torch.randint(-(2**31), 2**31 - 1, (3, -(-size // 32)), dtype=torch.int32)
    mask[1] = -1
    ops["apply_bitmask"](mine, entry_rows, mask)
    twins.apply_bitmask(theirs, entry_rows, mask)
    assert torch.equal(mine, theirs)


def test_a_row_is_the_same_in_every_batch(ops, library):
    logits, arguments_of_rows = torch.randn(40, 5000), arguments(40, 1.0, 50, 0.9, 0.01)
    whole = ops["sample"](logits, *arguments_of_rows)
    for count in (1, 2, 4):
        library.set_threads(count)
        assert torch.equal(
            ops["sample"](logits[7:9], *(x[7:9] for x in arguments_of_rows)), whole[7:9]
        )
        assert torch.equal(ops["sample"](logits, *arguments_of_rows), whole)


@pytest.mark.parametrize("size", [1, 5, 63, 1000, 151936])
@pytest.mark.parametrize("k", [0, 1, 7, 40, 10**6])
@pytest.mark.parametrize("normalise", [False, True])
def test_top_logprobs(ops, size, k, normalise):
    if size > 1000 and k > 1000:
        k = 500
    rows = 4
    logits = torch.randn(rows, size + 3)[:, :size] * 3
    logits[1, size // 2 :] = -torch.inf
    logits[1, 0] = 1.0
    chosen = torch.randint(0, size // 2 + 1, (rows,))
    chosen[1] = 0
    ids, values, rank = ops["top_logprobs"](logits, chosen, k, normalise)
    _, wanted, wanted_rank = twins.top_logprobs(logits, chosen, k, normalise)
    torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(rank, wanted_rank)
    assert torch.equal(ids[:, 0], chosen)
    scores = logits.log_softmax(-1) if normalise else logits
    torch.testing.assert_close(scores.gather(1, ids), wanted, rtol=1e-5, atol=1e-5)
    assert all(len(set(row.tolist())) == ids.shape[1] - 1 for row in ids[:, 1:])
    assert torch.equal(ids[:, 1:].gather(1, _order(values, ids)), ids[:, 1:])


def _order(values, ids):
    """Best first, the lowest id first among equals."""
    keys = [
        sorted(range(len(v)), key=lambda i: (-v[i], row[i]))
        for v, row in zip(values[:, 1:].tolist(), ids[:, 1:].tolist(), strict=True)
    ]
    return torch.tensor(keys, dtype=torch.int64).view(len(keys), -1)


def test_top_k_of_equal_values(ops):
    logits = torch.zeros(2, 300)
    logits[1, 100:] = 1.0
    ids, _, rank = ops["top_logprobs"](logits, torch.tensor([5, 5]), 3)
    assert ids[:, 1:].tolist() == [[0, 1, 2], [100, 101, 102]]
    assert rank.tolist() == [1, 201]


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.99, 0.999999])
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_top_p_keeps_what_the_twin_keeps(ops, top_p, scale):
    """Flat and peaked rows: the greatest token dropped and the least kept are the twin's."""
    size, rows = 5000, 8
    logits = torch.randn(1, size) * scale
    uniform = torch.linspace(0, 1 - 1e-9, rows, dtype=torch.float64)
    arguments_of_rows = (*arguments(rows, 1.0, 0, top_p, 0.0)[:-1], uniform)
    is_kept = twins.filter_logits(logits, *(x[:1] for x in arguments_of_rows[:-1]))[0].isfinite()
    drawn = ops["sample"](logits.expand(rows, -1).contiguous(), *arguments_of_rows)
    assert is_kept[drawn].float().mean() >= 1 - 1 / rows
    assert drawn[0] == is_kept.nonzero()[0]
