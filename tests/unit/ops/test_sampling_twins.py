"""The sampling twins against short references, and their independence of the rows beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modulm.ops import sampling_twins as ops

V = 300


def logits(rows: int, seed: int = 0, vocabulary: int = V) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def knobs(rows: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
    )


def reference_probs(row, temperature, top_k, top_p, min_p) -> np.ndarray:
    """Sorting, one filter after the other, as the papers describe them."""
    x = row.double().numpy() / temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    p[p < min_p * p.max() * (1 - 1e-7)] = 0
    if top_k:
        p[p < np.sort(p)[-min(top_k, len(p))]] = 0
    p /= p.sum()
    if top_p < 1:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0
    return p / p.sum()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [
    (0, 1.0, 0.0), (1, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.5, 0.0), (0, 0.999, 0.0), (0, 1.0, 0.1),
    (20, 0.8, 0.05), (V + 5, 0.9, 0.0), (0, 1e-9, 0.0), (0, 1.0, 1.0),
])  # fmt: skip
def test_filters_keep_what_the_definitions_say(temperature, top_k, top_p, min_p) -> None:
    x = logits(8)
    got = ops.filter_logits(x, *knobs(8, temperature, top_k, top_p, min_p)).softmax(-1)
    for row, probs in zip(x, got.double().numpy(), strict=True):
        expected = reference_probs(row, temperature, top_k, top_p, min_p)
        assert (probs > 0).tolist() == (expected > 0).tolist()
        np.testing.assert_allclose(probs, expected, atol=1e-6)


def test_top_p_looks_past_its_first_look() -> None:
    flat = torch.zeros(1, 5000) + torch.arange(5000) * 1e-4
    is_kept = ops.filter_logits(flat, *knobs(1, top_p=0.9)).isfinite().sum()
    assert int(is_kept) == int((reference_probs(flat[0], 1.0, 0, 0.9, 0.0) > 0).sum()) > 3000


def test_tokens_that_tie_with_the_last_one_are_kept() -> None:
    x = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    is_kept = ops.filter_logits(x, *knobs(1, top_k=2)).isfinite()
    assert is_kept.tolist() == [[False, True, True, True, False]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_argmax_takes_the_lowest_of_equals(dtype) -> None:
    x = torch.zeros(3, V, dtype=dtype)
    x[0, 17] = x[0, 5] = x[0, 211] = 2
    x[1, V - 1] = 1
    assert ops.argmax(x).tolist() == [5, V - 1, 0]


def test_rows_without_a_finite_maximum_give_no_token() -> None:
    x = logits(5)
    x[0, 3] = torch.nan
    x[1, 4] = torch.inf
    x[2] = -torch.inf
    x[3, 5] = -torch.inf
    assert (ops.argmax(x) < 0).tolist() == [True, True, True, False, False]
    drawn = ops.sample(x, *knobs(5), torch.full((5,), 0.5, dtype=torch.float64))
    assert (drawn < 0).tolist() == [True, True, True, False, False]


def test_temperature_zero_is_the_argmax_beside_rows_that_are_drawn() -> None:
    x = logits(4)
    temperature, *rest = knobs(4)
    temperature[[0, 2]] = 0
    u = torch.full((4,), 0.99, dtype=torch.float64)
    got = ops.sample(x, temperature, *rest, u)
    assert got[[0, 2]].tolist() == x[[0, 2]].argmax(-1).tolist()


def test_draws_follow_the_distribution() -> None:
    """Pearson's chi-square over the kept tokens; fixed seeds, so the outcome is fixed as well."""
    x = logits(1, 3, 40)
    draws = 20_000
    u = ops.uniforms(np.full(draws, 11), np.arange(draws))
    many = ops.sample(x.expand(draws, -1), *knobs(draws, 0.9, 25, 0.95, 0.001), torch.tensor(u))
    expected = reference_probs(x[0], 0.9, 25, 0.95, 0.001) * draws
    counts = np.bincount(many.numpy(), minlength=40)
    assert (counts[expected == 0] == 0).all()
    likely = expected > 5
    chi = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert likely.sum() > 5
    assert chi < likely.sum() + 4 * np.sqrt(2 * likely.sum())


@pytest.mark.parametrize("u", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_interval_draw_kept_tokens(u) -> None:
    x = logits(50, 5)
    got = ops.sample(x, *knobs(50, top_k=3), torch.full((50,), u, dtype=torch.float64))
    is_kept = ops.filter_logits(x, *knobs(50, top_k=3)).isfinite()
    assert is_kept.gather(1, got[:, None]).all()


def test_uniforms_are_uniform_and_differ_by_seed_and_position() -> None:
    grid = ops.uniforms(np.repeat(np.arange(100), 100), np.tile(np.arange(100), 100))
    assert len(set(grid.tolist())) == 10_000
    assert 0 <= grid.min() < grid.max() < 1
    counts = np.histogram(grid, 20, (0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 45
    by_seed = grid.reshape(100, 100)
    assert abs(np.corrcoef(by_seed[:-1].ravel(), by_seed[1:].ravel())[0, 1]) < 0.04
    assert abs(np.corrcoef(by_seed[:, :-1].ravel(), by_seed[:, 1:].ravel())[0, 1]) < 0.04


class SplitMix64:
    """The generator as its authors wrote it, in plain integers."""

    def __init__(self, state: int) -> None:
        self.state = state % 2**64

    def next(self) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) % 2**64
        z = self.state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (42, 7), (-1, 1000), (2**63 - 1, 3)])
def test_uniforms_are_splitmix64(seed, position) -> None:
    """A seed that users wrote down must give the same text in the next release."""
    generator = SplitMix64(SplitMix64(seed).next())
    stream = [generator.next() for _ in range(position + 1)]
    got = ops.uniforms(np.array([seed]), np.array([position]))
    assert got.tolist() == [(stream[-1] >> 11) * 2.0**-53]


def test_penalties_are_the_formulas() -> None:
    x = logits(3)
    before = x.clone()
    ids = torch.tensor([4, 9, 9, 250])
    entry_rows = torch.tensor([0, 0, 2, 2])
    counts = torch.tensor([0.0, 2.0, 1.0, 5.0])
    repetition = torch.tensor([1.3, 1.3, 1.0, 1.0])
    frequency = torch.tensor([0.2, 0.2, -0.5, -0.5])
    presence = torch.tensor([0.7, 0.7, 0.1, 0.1])
    ops.apply_penalties(x, entry_rows, ids, counts, repetition, frequency, presence)
    for p, i, c, r, f, s in zip(
        entry_rows, ids, counts, repetition, frequency, presence, strict=True
    ):
        old = before[p, i]
        new = (old / r if old > 0 else old * r) - f * c - s * (c > 0)
        torch.testing.assert_close(x[p, i], new)
        before[p, i] = x[p, i]
    assert torch.equal(x, before)


@pytest.mark.parametrize("vocabulary", [31, 32, 33, 300])
def test_bitmask(vocabulary) -> None:
    x = logits(3, 1, vocabulary)
    allowed = torch.rand(2, vocabulary, generator=torch.Generator().manual_seed(1)) < 0.3
    mask = np.zeros((2, -(-vocabulary // 32)), dtype=np.uint32)
    for r, i in allowed.nonzero().tolist():
        mask[r, i // 32] |= np.uint32(1 << (i % 32))
    before = x.clone()
    ops.apply_bitmask(x, torch.tensor([2, 0]), torch.from_numpy(mask.view(np.int32)))
    assert torch.equal(x[1], before[1])
    for logits_row, row in ((2, 0), (0, 1)):
        assert torch.equal(x[logits_row].isfinite(), allowed[row])
        assert torch.equal(x[logits_row][allowed[row]], before[logits_row][allowed[row]])


def test_top_logprobs() -> None:
    x = logits(4).log_softmax(-1)
    chosen = torch.tensor([0, 5, int(x[2].argmax()), 7])
    ids, values, rank = ops.top_logprobs(x, chosen, 3)
    assert ids.shape == values.shape == (4, 4)
    assert ids[:, 0].tolist() == chosen.tolist()
    for row in range(4):
        order = x[row].argsort(descending=True)
        assert ids[row, 1:].tolist() == order[:3].tolist()
        assert torch.equal(values[row], x[row][ids[row]])
        assert int(rank[row]) == order.tolist().index(int(chosen[row])) + 1
    assert ops.top_logprobs(x, chosen, 0)[0].shape == (4, 1)
    assert ops.top_logprobs(x, chosen, V + 9)[0].shape == (4, V + 1)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_row_gets_the_same_alone_and_in_a_crowd(data) -> None:
    rows = data.draw(st.integers(2, 9))
    vocabulary = data.draw(st.sampled_from([33, 512, 40_000]))
    x = logits(rows, data.draw(st.integers(0, 10**6)), vocabulary)
    settings_of = [
        torch.tensor([data.draw(st.sampled_from(v)) for _ in range(rows)], dtype=t)
        for v, t in (
            ([0.0, 0.7, 1.0, 1.8], torch.float32),
            ([0, 1, 3, 50, vocabulary], torch.int32),
            ([1.0, 0.3, 0.99], torch.float32),
            ([0.0, 0.05], torch.float32),
        )
    ]
    u = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
    together = ops.sample(x, *settings_of, u)
    scores = x.log_softmax(-1)
    for row in range(rows):
        one = slice(row, row + 1)
        single = ops.sample(x[one], *(s[one] for s in settings_of), u[one])
        assert single.tolist() == together[one].tolist()
        assert torch.equal(x[one].log_softmax(-1), scores[one])
