"""Scans and delta rules against their twins, at every level this machine runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modulm.contracts.model import StatePlan
from modulm.ops import recurrence

kernels = pytest.importorskip(
    "modulm_kernels_cpu", reason="no compiled CPU kernels: there was no C++ compiler"
)

SLOTS = 9


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def plan_of(counts, starts=None, kept=(), sources=None, first=0):
    starts = starts or (0,) * len(counts)
    return StatePlan(
        slots=torch.arange(first, first + len(counts)),
        fresh=torch.tensor([start == 0 for start in starts]),
        query_starts=torch.tensor([0, *counts]).cumsum(0).int(),
        counts=tuple(counts),
        starts=tuple(starts),
        sources=sources,
        kept=tuple(kept),
    )


def scan_inputs(tokens, heads, groups, dim, size, paces):
    return (
        numbers(tokens, heads, dim),
        numbers(tokens, heads).exp(),
        -numbers(heads, paces).exp(),
        numbers(tokens, groups, size),
        numbers(tokens, groups, size, seed=1),
    )


def delta_inputs(tokens, heads, key_heads, key_dim, value_dim):
    return (
        numbers(tokens, key_heads, key_dim),
        torch.nn.functional.normalize(numbers(tokens, key_heads, key_dim, seed=1), dim=-1),
        numbers(tokens, heads, value_dim),
        numbers(tokens, heads).sigmoid(),
        -numbers(tokens, heads, seed=1).exp(),
    )


#: (op, its inputs for some tokens, shape of a state, which inputs are not by token)
CASES = {
    "scan of heads": (
        "selective_scan", lambda n: scan_inputs(n, 6, 2, 7, 37, 1), (6, 7, 37), (2,)
    ),
    "scan of large heads": (
        "selective_scan", lambda n: scan_inputs(n, 2, 1, 5, 160, 1), (2, 5, 160), (2,)
    ),
    "scan of channels": (
        "selective_scan", lambda n: scan_inputs(n, 40, 1, 1, 16, 16), (40, 1, 16), (2,)
    ),
    "odd scan of channels": (
        "selective_scan", lambda n: scan_inputs(n, 40, 1, 1, 21, 21), (40, 1, 21), (2,)
    ),
    "delta rule": ("delta_rule", lambda n: delta_inputs(n, 4, 2, 12, 70), (4, 12, 70), ()),
    "small delta rule": ("delta_rule", lambda n: delta_inputs(n, 2, 2, 5, 3), (2, 5, 3), ()),
}  # fmt: skip
NAMES = pytest.mark.parametrize("name", CASES)


def part(inputs, fixed, ids):
    return [x if place in fixed else x[ids] for place, x in enumerate(inputs)]


@NAMES
def test_equals_the_twin(level, name):
    op, make, shape, _ = CASES[name]
    counts, starts = (1, 70, 3, 1), (0, 64, 0, 5)
    inputs, states = make(sum(counts)), numbers(SLOTS, *shape)
    plan = plan_of(counts, starts, [(1, 64, 7)], torch.tensor([0, 8, 2, 3]))
    mine, twins = states.clone(), states.clone()
    found = kernels.ops(level)[op](*inputs, mine, plan)
    expected = recurrence.__dict__[op](*inputs, twins, plan)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(mine, twins, atol=1e-4, rtol=1e-4)
    assert torch.equal(mine[[4, 5, 6, 8]], states[[4, 5, 6, 8]])


@NAMES
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_cut_and_no_neighbour_changes_a_bit(level, name, data):
    op, make, shape, fixed = CASES[name]
    run = kernels.ops(level)[op]
    length = data.draw(st.integers(2, 90))
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=4)))
    inputs = make(length + 20)
    ids = torch.arange(length)
    states = torch.full((SLOTS, *shape), torch.nan)
    kept = [(0, cut, 4 + place) for place, cut in enumerate(cuts)]
    whole = run(*part(inputs, fixed, ids), states, plan_of([length], kept=kept))
    pieces = torch.full((SLOTS, *shape), torch.nan)
    found = []
    for place, (begin, end) in enumerate(zip([0, *cuts], [*cuts, length], strict=True)):
        here = torch.cat([torch.arange(begin, end), torch.arange(length, length + 20)])
        plan = plan_of([end - begin, 20], [begin, 0])
        found.append(run(*part(inputs, fixed, here), pieces, plan)[: end - begin])
        if end != length:
            assert torch.equal(states[4 + place], pieces[0])
    assert torch.equal(torch.cat(found), whole)
    assert torch.equal(pieces[0], states[0])


@NAMES
def test_threads_change_no_bit(name):
    op, make, shape, _ = CASES[name]
    level = kernels.levels()[-1]
    library, inputs = kernels.load(level), make(50)
    before, results = library.threads, []
    for threads in (1, 3):
        library.set_threads(threads)
        states = torch.zeros(SLOTS, *shape)
        results.append((kernels.ops(level)[op](*inputs, states, plan_of([30, 20])), states))
    library.set_threads(before)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_shapes_that_do_not_fit_are_refused():
    x, dt, a, b, c = scan_inputs(4, 6, 2, 7, 37, 1)
    states = torch.zeros(SLOTS, 6, 7, 37)
    with pytest.raises(ValueError, match="dt must be"):
        kernels.ops()["selective_scan"](x, dt[:3], a, b, c, states, plan_of([4]))
    with pytest.raises(ValueError, match="states must be float32"):
        kernels.ops()["selective_scan"](x, dt, a, b, c, states.half(), plan_of([4]))
