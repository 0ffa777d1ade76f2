"""Rows of any mix of lengths, side by side: each as if it were alone and whole."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modulm.contracts.model import StatePlan
from modulm.nn import recur, selective_scan

HEADS, DIM, SIZE, GROUPS, SLOTS = 4, 3, 5, 2, 6


def plan_of(counts, slots, fresh):
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return StatePlan(torch.tensor(slots), torch.tensor(fresh), starts, tuple(counts))


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def scan_of_one(x, dt, a, b, c):
    """The recurrence as the paper writes it, head by head."""
    y = torch.zeros_like(x)
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        state = torch.zeros(DIM, SIZE)
        for place in range(x.shape[0]):
            decay = torch.exp(dt[place, head] * a[head])
            new = dt[place, head] * torch.outer(x[place, head], b[place, group])
            state = decay * state + new
            y[place, head] = state @ c[place, group]
    return y


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(0, 100))
def test_rows_are_scanned_as_if_alone_however_they_are_cut(lengths, seed):
    total = sum(lengths)
    x, b, c = numbers(total, HEADS, DIM), numbers(total, GROUPS, SIZE), numbers(total, GROUPS, SIZE)
    dt, a = numbers(total, HEADS).exp(), -numbers(HEADS, 1).exp()
    states = torch.full((SLOTS, HEADS, DIM, SIZE), torch.nan)
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed)).tolist()
    starts = [sum(lengths[:row]) for row in range(len(lengths))]
    done, found = [0] * len(lengths), torch.empty_like(x)
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        rows = [row for row, length in enumerate(lengths) if done[row] < length]
        counts = [min(1 + (seed + row) % 3, lengths[row] - done[row]) for row in rows]
        ids = torch.cat(
            [torch.arange(n) + starts[r] + done[r] for r, n in zip(rows, counts, strict=True)]
        )
        plan = plan_of(counts, [slots[row] for row in rows], [done[row] == 0 for row in rows])
        found[ids] = selective_scan(x[ids], dt[ids], a, b[ids], c[ids], states, plan)
        for row, count in zip(rows, counts, strict=True):
            done[row] += count
    for start, length in zip(starts, lengths, strict=True):
        own = slice(start, start + length)
        torch.testing.assert_close(found[own], scan_of_one(x[own], dt[own], a, b[own], c[own]))
    unused = slots[len(lengths) :]
    assert states[unused].isnan().all()


def test_one_call_when_every_row_has_one_token():
    calls = []

    def step(state, tokens):
        calls.append(tokens.tolist())
        state += 1
        return state

    states, out = torch.zeros(3, 2), torch.empty(2, 2)
    recur(states, plan_of([1, 1], [2, 0], [False, False]), step, out)
    assert calls == [[0, 1]]
    assert states.tolist() == [[1, 1], [0, 0], [1, 1]]
