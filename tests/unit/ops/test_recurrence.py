"""Recurrences: each row as if it were alone and whole, however steps cut it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modulm.contracts.model import StatePlan
from modulm.contracts.state import SEGMENT
from modulm_layers.recurrence import delta_rule, selective_scan

# A head's state takes whole registers, as those of models do: where it does not, torch's products
# round by where in memory a row lies (a SIZE of 5 shows it).
HEADS, GROUPS, DIM, SIZE, SLOTS = 4, 2, 3, 16, 8


def draw(tokens, *shape):
    return torch.randn(tokens, *shape, generator=torch.Generator().manual_seed(tokens + len(shape)))


class Scan:
    """The recurrence of Mamba; `paces`: decays per head."""

    state = (HEADS, DIM, SIZE)

    def __init__(self, tokens, paces):
        self.x, self.step = draw(tokens, HEADS, DIM), draw(tokens, HEADS)
        self.b, self.c = draw(tokens, GROUPS, SIZE), draw(tokens, GROUPS, SIZE, 1).squeeze(-1)
        self.a_log, self.skip, self.bias = draw(HEADS, paces), draw(HEADS), draw(HEADS) / 2

    def run(self, ids, states, plan):
        parts = self.x[ids], self.step[ids], self.a_log, self.b[ids], self.c[ids], self.skip
        return selective_scan(*parts, states, plan, bias=self.bias, limit=(0.01, 3.0))

    def expected(self, ids):
        """[n, heads, dim] and the last state, written as in the paper, in fp64."""
        state, y = torch.zeros(self.state, dtype=torch.float64), []
        b, c = (t.double().repeat_interleave(HEADS // GROUPS, 1) for t in (self.b, self.c))
        a, skip = -self.a_log.double().exp(), self.skip.double()[:, None]
        for t in ids.tolist():
            dt, x = (self.step[t] + self.bias).double(), self.x[t].double()
            dt = (1 + dt.exp()).log().clamp(0.01, 3.0)
            state = state * (dt[:, None] * a).exp()[:, None]
            state = state + (dt[:, None] * x)[..., None] * b[t][:, None]
            y.append((state * c[t][:, None]).sum(-1) + skip * x)
        return torch.stack(y), state


class Delta:
    """The gated delta rule."""

    state = (HEADS, SIZE, DIM)

    def __init__(self, tokens, paces):
        del paces
        self.q, self.k = draw(tokens, GROUPS, SIZE), draw(tokens, GROUPS, SIZE, 1)[..., 0]
        self.v, self.beta = draw(tokens, HEADS, DIM), draw(tokens, HEADS)
        self.step, self.a_log, self.bias = draw(tokens, HEADS, 1)[..., 0], draw(HEADS), draw(HEADS)

    def run(self, ids, states, plan):
        parts = (part[ids] for part in (self.q, self.k, self.v, self.beta, self.step))
        return delta_rule(*parts, self.a_log, self.bias, states, plan)

    def expected(self, ids):
        state, y = torch.zeros(self.state, dtype=torch.float64), []
        unit = torch.nn.functional.normalize
        q, k = (
            unit(t.double(), dim=-1).repeat_interleave(HEADS // GROUPS, 1) for t in (self.q, self.k)
        )
        for t in ids.tolist():
            dt = (1 + (self.step[t] + self.bias).double().exp()).log()
            state = state * (-self.a_log.double().exp() * dt).exp()[:, None, None]
            miss = self.v[t].double() - torch.einsum("hkv,hk->hv", state, k[t])
            change = miss * self.beta[t].double().sigmoid()[:, None]
            state = state + torch.einsum("hk,hv->hkv", k[t], change)
            y.append(torch.einsum("hkv,hk->hv", state, q[t]) / SIZE**0.5)
        return torch.stack(y), state


RULES = pytest.mark.parametrize(
    ("rule", "paces"), [(Scan, 1), (Scan, SIZE), (Delta, 1)], ids=["ssd", "scan", "delta"]
)


class Rows:
    """Rows of one rule, taken forward by steps; `slots`: where each row's state lies."""

    def __init__(self, rule, lengths, slots=tuple(range(SLOTS))):
        self.rule, self.lengths = rule, lengths
        self.first = [sum(lengths[:row]) for row in range(len(lengths))]
        self.slots, self.done = list(slots), [0] * len(lengths)
        self.states = torch.full((SLOTS, *rule.state), torch.nan)
        self.outputs = [[] for _ in lengths]

    def step(self, counts, kept=()):
        """counts: row -> tokens."""
        rows, sizes = list(counts), tuple(counts.values())
        ids = [torch.arange(n) + self.first[r] + self.done[r] for r, n in counts.items()]
        plan = StatePlan(
            slots=torch.tensor([self.slots[row] for row in rows]),
            fresh=torch.tensor([self.done[row] == 0 for row in rows]),
            query_starts=torch.tensor([0, *sizes]).cumsum(0).int(),
            counts=sizes,
            starts=tuple(self.done[row] for row in rows),
            saves=tuple(kept),
        )
        y = self.rule.run(torch.cat(ids), self.states, plan)
        for row, part in zip(rows, y.split(list(sizes)), strict=True):
            self.outputs[row].append(part)
            self.done[row] += len(part)

    def result(self, row):
        return torch.cat(self.outputs[row]), self.states[self.slots[row]]


def whole(rule, lengths, row):
    single = Rows(rule, lengths)
    single.step({row: lengths[row]})
    return single.result(row)


@RULES
@settings(max_examples=8, deadline=None)
@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_rows_in_any_pieces_give_what_the_formula_says(rule, paces, lengths, seed):
    rule = rule(sum(lengths), paces)
    rng = torch.Generator().manual_seed(seed)
    rows = Rows(rule, lengths, torch.randperm(SLOTS, generator=rng).tolist())
    while any(at < n for at, n in zip(rows.done, lengths, strict=True)):
        left = {row: n - rows.done[row] for row, n in enumerate(lengths) if n > rows.done[row]}
        rows.step(
            {
                row: min(n, 1 + int(torch.randint(90, (1,), generator=rng)))
                for row, n in left.items()
            }
        )
    for row, (first, length) in enumerate(zip(rows.first, lengths, strict=True)):
        y, state = rule.expected(torch.arange(first, first + length))
        torch.testing.assert_close(rows.result(row)[0], y.float(), atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(rows.result(row)[1], state.float(), atol=2e-4, rtol=2e-4)
    assert rows.states[rows.slots[len(lengths) :]].isnan().all()


@RULES
@settings(max_examples=8, deadline=None)
@given(length=st.integers(2, 300), other=st.integers(1, 150), data=st.data())
def test_steps_that_end_at_segments_change_no_bit(rule, paces, length, other, data):
    lengths = (length, other)
    rule = rule(sum(lengths), paces)
    rows = Rows(rule, lengths)
    borders = range(SEGMENT, length, SEGMENT)
    cuts = sorted(data.draw(st.sets(st.sampled_from(borders)))) if borders else []
    for at, end in zip([0, *cuts], [*cuts, length], strict=True):
        rows.step({0: end - at, **({1: other} if not at else {})})
    for row in (0, 1):
        y, state = whole(rule, lengths, row)
        assert torch.equal(rows.result(row)[0], y)
        assert torch.equal(rows.result(row)[1], state)


@RULES
def test_states_on_the_way_are_those_of_steps_that_end_there(rule, paces):
    rule = rule(230, paces)
    rows = Rows(rule, (30, 200))
    rows.step({1: 10})
    rows.step({0: 30, 1: 190}, kept=[(1, SEGMENT - 10, 5), (1, 3 * SEGMENT - 10, 6)])
    shorter = Rows(rule, (30, 200))
    shorter.step({1: 10})
    shorter.step({1: SEGMENT - 10})
    assert torch.equal(rows.states[5], shorter.states[1])
    shorter.step({1: 2 * SEGMENT})
    assert torch.equal(rows.states[6], shorter.states[1])


@RULES
def test_a_run_whose_states_are_all_wanted_is_walked_token_by_token(rule, paces):
    """Drafted tokens: each token has the bits of a step of its own, whatever runs beside it."""
    rule = rule(200, paces)
    rows, single = Rows(rule, (100, 100)), Rows(rule, (100, 100))
    for each in (rows, single):
        each.step({0: 61})
    rows.step({0: 6, 1: 90}, kept=[(0, at, 1 + at) for at in range(1, 6)])
    for at in range(1, 7):
        single.step({0: 1})
        state = rows.states[0 if at == 6 else 1 + at]
        assert torch.equal(state, single.states[0])
    assert torch.equal(rows.result(0)[0], single.result(0)[0])
    assert torch.equal(rows.result(1)[0], whole(rule, (100, 100), 1)[0][:90])
    rows.done[0] -= 3  # three of the tokens were wrong
    rows.slots[0] = 1 + 3
    rows.step({0: 1}, kept=[(0, 1, 7)])
    assert torch.equal(rows.states[4], rows.states[5])
    assert torch.equal(rows.states[7], rows.states[5])


@RULES
def test_a_row_may_read_one_slot_and_write_another(rule, paces):
    rule = rule(100, paces)
    rows = Rows(rule, (100,))
    rows.step({0: SEGMENT})
    before = rows.states[0].clone()
    tokens = torch.arange(SEGMENT, 100)
    plan = StatePlan(
        slots=torch.tensor([3]),
        fresh=torch.tensor([False]),
        query_starts=torch.tensor([0, 36], dtype=torch.int32),
        counts=(36,),
        starts=(SEGMENT,),
        sources=torch.tensor([0]),
    )
    rule.run(tokens, rows.states, plan)
    assert torch.equal(rows.states[0], before)
    assert torch.equal(rows.states[3], whole(rule, (100,), 0)[1])
