"""Scans, delta rules and convolutions against their twins."""

from __future__ import annotations

import pytest
import torch
from samples import parametrize_sample

from modulm.contracts.model import StatePlan
from modulm_kernels_triton.device import interpreting
from modulm_layers import recurrence

SLOTS = 9


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def plan_of(counts, device, starts=None, kept=(), sources=None, first=0):
    starts = starts or (0,) * len(counts)
    return StatePlan(
        slots=torch.arange(first, first + len(counts), device=device),
        fresh=torch.tensor([start == 0 for start in starts], device=device),
        query_starts=torch.tensor([0, *counts]).cumsum(0).int().to(device),
        counts=tuple(counts),
        starts=tuple(starts),
        sources=None if sources is None else torch.tensor(sources, device=device),
        saves=tuple(kept),
    )


def strided(x):
    """The same numbers in a wider tensor, as parts of a projection lie."""
    wide = torch.full((x.shape[0], x[0].numel() + 5), torch.nan, dtype=x.dtype, device=x.device)
    wide[:, 3:-2] = x.flatten(1)
    return wide[:, 3:-2].view(x.shape)


def scan_inputs(tokens, heads, groups, dim, size, paces):
    x, step = numbers(tokens, heads, dim), numbers(tokens, heads)
    b, c = numbers(tokens, groups, size), numbers(tokens, groups, size, seed=1)
    return x, step, numbers(heads, paces), b, c, numbers(heads)


def delta_inputs(tokens, heads, key_heads, key_dim, value_dim):
    q, k = numbers(tokens, key_heads, key_dim), numbers(tokens, key_heads, key_dim, seed=1)
    v, beta = numbers(tokens, heads, value_dim), numbers(tokens, heads)
    return q, k, v, beta, numbers(tokens, heads, seed=1), numbers(heads), numbers(heads, seed=1)


def conv_inputs(tokens, channels, width, bias, silu):
    weight = numbers(channels, 1, width)
    return numbers(tokens, channels), weight, numbers(channels) if bias else None, silu


LIMIT = {"bias": numbers(4), "limit": (0.1, 2.0)}
#: (op, its inputs for some tokens, shape of a state, which inputs are not by token, keywords)
CASES = {
    "scan of heads": (
        "selective_scan", lambda n: scan_inputs(n, 4, 2, 7, 19, 1), (4, 7, 19), (2, 5), LIMIT
    ),
    "scan of channels": (
        "selective_scan", lambda n: scan_inputs(n, 40, 1, 1, 5, 5), (40, 1, 5), (2, 5), {}
    ),
    "delta rule": (
        "delta_rule", lambda n: delta_inputs(n, 4, 2, 12, 20), (4, 12, 20), (5, 6), {"reach": 2.0}
    ),
    "convolution": (
        "causal_conv", lambda n: conv_inputs(n, 130, 4, False, True), (3, 130), (1, 2, 3), {}
    ),
    "biased convolution": (
        "causal_conv", lambda n: conv_inputs(n, 37, 3, True, False), (2, 37), (1, 2, 3), {}
    ),
}  # fmt: skip
NAMES = pytest.mark.parametrize("name", CASES)


def placed(inputs, fixed, dtype, device):
    """What comes by token in `dtype` and in wider tensors, as the weights of a convolution are."""
    narrow = len(inputs) == 4
    return [
        x if not isinstance(x, torch.Tensor)
        else x.to(device, dtype if narrow else None) if index in fixed
        else strided(x.to(device, dtype))
        for index, x in enumerate(inputs)
    ]  # fmt: skip


@NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("counts", "starts"), [((1, 70, 3, 1), (0, 63, 0, 5)), ((1, 1, 1, 1), (0, 3, 0, 64))]
)
def test_equals_the_twin(ops, device, name, dtype, counts, starts):
    op, make, shape, fixed, keywords = CASES[name]
    inputs = placed(make(sum(counts)), fixed, dtype, device)
    keywords = {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in keywords.items()}
    kept_in = dtype if op == "causal_conv" else torch.float32
    states = numbers(SLOTS, *shape).to(device, kept_in)
    states_kept = [(1, 1, 6), (1, 50, 7)] if counts[1] > 1 else [(3, 1, 7)]
    plan = plan_of(counts, device, starts, states_kept, [0, 8, 2, 3])
    mine, theirs = states.clone(), states.clone()
    actual = ops[op](*inputs, mine, plan, **keywords)
    expected = recurrence.__dict__[op](*inputs, theirs, plan, **keywords)
    bound = 1e-4 if actual.dtype == torch.float32 else 2e-3
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, atol=bound, rtol=bound)
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    assert torch.equal(mine[[4, 5, 8]], states[[4, 5, 8]])


@parametrize_sample("name", CASES, every=2)
def test_no_cut_and_no_neighbour_changes_a_bit(ops, device, name):
    """A step that ends where a longer one keeps a state leaves that state; company is the same.

    A single token has a kernel of its own, which adds in another order where kernels are compiled.
    """
    op, make, shape, fixed, keywords = CASES[name]
    keywords = {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in keywords.items()}
    inputs = placed(make(130), fixed, torch.float32, device)

    def run(first, last, states, plan):
        inputs_cut = [x if index in fixed else x[first:last] for index, x in enumerate(inputs)]
        return ops[op](*inputs_cut, states, plan, **keywords)

    states = torch.full((SLOTS, *shape), torch.nan, device=device)
    plan = plan_of([100, 30], device, kept=[(0, 64, 4), (0, 65, 5), (0, 90, 6)])
    whole = run(0, 130, states, plan)
    pieces, outputs, at = torch.full_like(states, torch.nan), [], 0
    for stop, slot in ((64, 4), (65, 5), (90, 6), (100, 0)):
        outputs.append(run(at, stop, pieces, plan_of([stop - at], device, [at])))
        if stop - at == 1 and not interpreting():
            torch.testing.assert_close(pieces[0], states[slot], atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(outputs[-1], whole[at:stop], atol=1e-5, rtol=1e-5)
            pieces[0], outputs[-1] = states[slot], whole[at:stop]
        assert torch.equal(pieces[0], states[slot])
        at = stop
    outputs.append(run(100, 130, pieces, plan_of([30], device, first=1)))
    assert torch.equal(torch.cat(outputs), whole)
    assert torch.equal(pieces[1], states[1])


def test_a_convolution_of_short_steps_keeps_what_came_before(ops, device):
    """Steps of fewer tokens than a kernel is wide, and states wanted within them."""
    x, weight, *_ = placed(conv_inputs(6, 5, 4, False, False), (1, 2, 3), torch.float32, device)
    run, whole = ops["causal_conv"], torch.zeros(SLOTS, 3, 5, device=device)
    expected = run(x, weight, None, False, whole, plan_of([6], device))
    states = torch.zeros(SLOTS, 3, 5, device=device)
    outputs = [run(x[:1], weight, None, False, states, plan_of([1], device))]
    plan = plan_of([2], device, [1], [(0, 1, 2)], [0], first=1)
    outputs.append(run(x[1:3], weight, None, False, states, plan))
    outputs.append(run(x[3:], weight, None, False, states, plan_of([3], device, [3], first=1)))
    assert torch.equal(torch.cat(outputs), expected)
    assert torch.equal(states[1], whole[0])
    assert torch.equal(states[2], torch.cat([torch.zeros(1, 5, device=device), x[:2]]))


def test_keys_that_are_all_alike(ops, device):
    """What a segment's tokens change of each other adds up: the inverse is found in order."""
    q, k, v, beta, step, *rest = delta_inputs(64, 1, 1, 4, 3)
    inputs = [
        x.to(device)
        for x in (q, torch.ones_like(k), v, torch.full_like(beta, 9.0), step - 20.0, *rest)
    ]
    mine, theirs = torch.zeros(2, 1, 1, 4, 3, device=device)
    plan = plan_of([64], device)
    actual = ops["delta_rule"](*inputs, mine, plan)
    expected = recurrence.delta_rule(*inputs, theirs, plan)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_shapes_that_do_not_fit_are_refused(ops, device):
    x, step, *others = (part.to(device) for part in scan_inputs(4, 6, 2, 7, 37, 1))
    states, plan = torch.zeros(SLOTS, 6, 7, 37, device=device), plan_of([4], device)
    with pytest.raises(ValueError, match="step must be"):
        ops["selective_scan"](x, step[:3], *others, states, plan)
    with pytest.raises(ValueError, match="states must be float32"):
        ops["selective_scan"](x, step, *others, states.half(), plan)
    with pytest.raises(ValueError, match="weight must be"):
        ops["causal_conv"](
            x.flatten(1), torch.ones(3, 1, 4), None, False, torch.zeros(1, 3, 42), plan
        )
    with pytest.raises(ValueError, match="states must be"):
        ops["delta_rule"](*delta_inputs(4, 2, 2, 3, 5), torch.zeros(1, 2, 5, 3), plan)
