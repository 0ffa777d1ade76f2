"""Scans and delta rules against their twins, at every level this machine runs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modulm.contracts.model import StatePlan
from modulm.ops import twins
from modulm_layers import recurrence

kernels = pytest.importorskip(
    "modulm_kernels_cpu", reason="no compiled CPU kernels: make setup says why"
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
        saves=tuple(kept),
    )


def strided(x):
    """The same numbers in a wider tensor, as parts of a projection lie."""
    wide = torch.full((x.shape[0], x[0].numel() + 5), torch.nan, dtype=x.dtype)
    wide[:, 3:-2] = x.flatten(1)
    return wide[:, 3:-2].view(x.shape)


def scan_inputs(tokens, heads, groups, dim, size, paces, dtype=torch.float32):
    by_token = (
        numbers(tokens, heads, dim),
        numbers(tokens, heads),
        numbers(tokens, groups, size),
        numbers(tokens, groups, size, seed=1),
    )
    x, step, b, c = (strided(part.to(dtype)) for part in by_token)
    return x, step, numbers(heads, paces), b, c, numbers(heads)


def delta_inputs(tokens, heads, key_heads, key_dim, value_dim, dtype=torch.float32):
    by_token = (
        numbers(tokens, key_heads, key_dim),
        numbers(tokens, key_heads, key_dim, seed=1),
        numbers(tokens, heads, value_dim),
        numbers(tokens, heads),
        numbers(tokens, heads, seed=1),
    )
    return (*(strided(part.to(dtype)) for part in by_token), numbers(heads), numbers(heads, seed=1))


def conv_inputs(tokens, channels, width, bias, silu, dtype=torch.float32):
    x, weight = strided(numbers(tokens, channels).to(dtype)), numbers(channels, 1, width).to(dtype)
    return x, weight, numbers(channels).to(dtype) if bias else None, silu


BF16 = torch.bfloat16
LIMIT = {"bias": numbers(6), "limit": (0.1, 2.0)}
#: (op, its inputs for some tokens, shape of a state, which inputs are not by token, keywords)
CASES = {
    "scan of heads": (
        "selective_scan", lambda n: scan_inputs(n, 6, 2, 7, 37, 1), (6, 7, 37), (2, 5), LIMIT
    ),
    "scan of heads in bf16": (
        "selective_scan", lambda n: scan_inputs(n, 6, 2, 7, 37, 1, BF16), (6, 7, 37), (2, 5), LIMIT
    ),
    "scan of large heads": (
        "selective_scan", lambda n: scan_inputs(n, 2, 1, 5, 160, 1), (2, 5, 160), (2, 5), {}
    ),
    "scan of channels": (
        "selective_scan", lambda n: scan_inputs(n, 40, 1, 1, 16, 16), (40, 1, 16), (2, 5), {}
    ),
    "odd scan of channels": (
        "selective_scan", lambda n: scan_inputs(n, 40, 1, 1, 21, 21), (40, 1, 21), (2, 5), {}
    ),
    "delta rule": ("delta_rule", lambda n: delta_inputs(n, 4, 2, 12, 70), (4, 12, 70), (5, 6),
                   {"reach": 2.0}),
    "small delta rule": (
        "delta_rule", lambda n: delta_inputs(n, 2, 2, 5, 3), (2, 5, 3), (5, 6), {}
    ),
    "delta rule in bf16": (
        "delta_rule", lambda n: delta_inputs(n, 4, 2, 12, 70, BF16), (4, 12, 70), (5, 6), {}
    ),
    "convolution": (
        "causal_conv", lambda n: conv_inputs(n, 530, 4, False, True), (3, 530), (1, 2, 3), {}
    ),
    "convolution in bf16": (
        "causal_conv", lambda n: conv_inputs(n, 37, 3, True, False, BF16), (2, 37), (1, 2, 3), {}
    ),
}  # fmt: skip
NAMES = pytest.mark.parametrize("name", CASES)


def part(inputs, fixed, ids):
    return [x if index in fixed else x[ids] for index, x in enumerate(inputs)]


def kept_in(inputs, op):
    """The dtype of states: a convolution keeps its inputs."""
    return inputs[0].dtype if op == "causal_conv" else torch.float32


@NAMES
def test_equals_the_twin(level, name):
    op, make, shape, _, keywords = CASES[name]
    counts, starts = (1, 70, 3, 1), (0, 64, 0, 5)
    inputs = make(sum(counts))
    states = numbers(SLOTS, *shape).to(kept_in(inputs, op))
    plan = plan_of(counts, starts, [(1, 64, 7)], torch.tensor([0, 8, 2, 3]))
    mine, twins = states.clone(), states.clone()
    actual = kernels.ops(level)[op](*inputs, mine, plan, **keywords)
    expected = recurrence.__dict__[op](*inputs, twins, plan, **keywords)
    bound = 1e-4 if actual.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(actual, expected, atol=bound, rtol=bound)
    torch.testing.assert_close(mine, twins, atol=1e-4, rtol=1e-4)
    assert torch.equal(mine[[4, 5, 6, 8]], states[[4, 5, 6, 8]])


@NAMES
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_cut_and_no_neighbour_changes_a_bit(level, name, data):
    op, make, shape, fixed, keywords = CASES[name]
    run = partial(kernels.ops(level)[op], **keywords)
    length = data.draw(st.integers(2, 90))
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=4)))
    inputs = make(length + 20)
    ids = torch.arange(length)
    dtype = kept_in(inputs, op)
    states = torch.full((SLOTS, *shape), torch.nan, dtype=dtype)
    states_kept = [(0, cut, 4 + index) for index, cut in enumerate(cuts)]
    whole = run(*part(inputs, fixed, ids), states, plan_of([length], kept=states_kept))
    pieces = torch.full((SLOTS, *shape), torch.nan, dtype=dtype)
    outputs = []
    for index, (begin, end) in enumerate(zip([0, *cuts], [*cuts, length], strict=True)):
        here = torch.cat([torch.arange(begin, end), torch.arange(length, length + 20)])
        plan = plan_of([end - begin, 20], [begin, 0])
        outputs.append(run(*part(inputs, fixed, here), pieces, plan)[: end - begin])
        if end != length:
            assert torch.equal(states[4 + index], pieces[0])
    assert torch.equal(torch.cat(outputs), whole)
    assert torch.equal(pieces[0], states[0])


@NAMES
def test_threads_change_no_bit(name):
    op, make, shape, _, keywords = CASES[name]
    level = kernels.levels()[-1]
    library, inputs = kernels.load(level), make(50)
    before, results = library.threads, []
    for threads in (1, 3):
        library.set_threads(threads)
        states = torch.zeros(SLOTS, *shape, dtype=kept_in(inputs, op))
        actual = kernels.ops(level)[op](*inputs, states, plan_of([30, 20]), **keywords)
        results.append((actual, states))
    library.set_threads(before)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_a_convolution_of_short_steps_keeps_what_came_before():
    """Steps of fewer tokens than a kernel is wide, and states wanted within them."""
    x, weight, *_ = conv_inputs(6, 5, 4, False, False)
    run, whole = kernels.ops()["causal_conv"], torch.zeros(SLOTS, 3, 5)
    expected = run(x, weight, None, False, whole, plan_of([6]))
    states = torch.zeros(SLOTS, 3, 5)
    outputs = [run(x[:1], weight, None, False, states, plan_of([1]))]
    plan = plan_of([2], [1], [(0, 1, 0)], torch.tensor([0]), first=1)
    outputs.append(run(x[1:3], weight, None, False, states, plan))
    outputs.append(run(x[3:], weight, None, False, states, plan_of([3], [3], first=1)))
    assert torch.equal(torch.cat(outputs), expected)
    assert torch.equal(states[1], whole[0])
    assert torch.equal(states[0], torch.cat([torch.zeros(1, 5), x[:2]]))


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("alike", [True, False])
def test_gated_norms(level, norm_first, alike, dtype):
    x, gate = numbers(5, 3 * 37), strided(numbers(5, 3 * 37, seed=1).to(dtype))
    weight = numbers(37 if alike else 3 * 37)
    for scales in (weight, weight.to(dtype)):
        arguments = (x, gate, scales, 1e-5, 3)
        actual = kernels.ops(level)["gated_rms_norm"](*arguments, norm_first=norm_first)
        expected = twins.gated_rms_norm(*arguments, norm_first=norm_first)
        assert actual.dtype == dtype
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(actual, expected, atol=bound, rtol=bound)


def test_shapes_that_do_not_fit_are_refused():
    x, step, *others = scan_inputs(4, 6, 2, 7, 37, 1)
    states = torch.zeros(SLOTS, 6, 7, 37)
    with pytest.raises(ValueError, match="step must be"):
        kernels.ops()["selective_scan"](x, step[:3], *others, states, plan_of([4]))
    with pytest.raises(ValueError, match="states must be float32"):
        kernels.ops()["selective_scan"](x, step, *others, states.half(), plan_of([4]))
    with pytest.raises(ValueError, match="weight must be"):
        kernels.ops()["causal_conv"](
            x.flatten(1), torch.ones(3, 1, 4), None, False, torch.zeros(1, 3, 42), plan_of([4])
        )
