"""Experts: choosing them, sorting by them, and all of a layer's in two products."""

from __future__ import annotations

import pytest
import torch
from samples import parametrize_sample
from tests.plugins.kernels.triton.close import assert_close, each_dtype

from modulm.ops import twins
from modulm_quantized.codes import Codes
from modulm_quantized.words import E2M1

ROUTES = [
    ({}, 12), ({"renormalise": False, "scale": 2.5}, 12), ({"scoring": "sigmoid"}, 9),
    ({"scoring": "sigmoid", "groups": 4, "top_groups": 2, "group_score": "top2"}, 12),
    ({"groups": 3, "top_groups": 2}, 12), ({"scoring": "sigmoid", "scale": 0.5}, 64),
]  # fmt: skip


@each_dtype
@parametrize_sample(("settings", "experts"), ROUTES, every=2)
@pytest.mark.parametrize("biased", [False, True])
def test_routing(ops, device, settings, experts, biased, dtype):
    logits = torch.randn(5, experts + 3).to(device, dtype)[:, :experts]
    bias = torch.randn(experts, device=device) if biased else None
    weights, ids = ops["moe_route"](logits, 4, bias=bias, **settings)
    wanted, order = twins.moe_route(logits, 4, bias=bias, **settings)
    assert torch.equal(ids, order)
    assert_close(weights, wanted)


def test_groups_whose_experts_are_barred(ops, device):
    """A bias of -inf leaves groups without any expert."""
    bias = torch.zeros(8, device=device)
    bias[2:6] = -torch.inf
    logits = torch.randn(4, 8).to(device)
    settings = {"scoring": "sigmoid", "groups": 4, "top_groups": 2, "bias": bias}
    weights, ids = ops["moe_route"](logits, 3, **settings)
    wanted, order = twins.moe_route(logits, 3, **settings)
    assert torch.equal(ids, order)
    assert_close(weights, wanted)


@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_sorting(ops, device, tokens):
    from modulm_kernels_triton.by_expert import sort_by_expert

    ids = torch.stack([torch.randperm(9)[:3] for _ in range(tokens)]).to(device)
    ids[ids == 4] = 8
    by_expert = sort_by_expert(ids, 9, 16)
    order = ids.flatten().argsort(stable=True).int()
    assert torch.equal(by_expert.order, order)
    blocks = [block for block in by_expert.blocks.tolist() if block[0] >= 0]
    counts = ids.flatten().bincount(minlength=9).tolist()
    wanted, first = [], 0
    for expert, count in enumerate(counts):
        wanted += [[expert, first + at, min(16, count - at)] for at in range(0, count, 16)]
        first += count
    assert blocks == wanted
    assert all(block[0] == -1 for block in by_expert.blocks.tolist()[len(blocks) :])


def inputs_of(dtype, device, tokens=6, hidden=40, inner=24, experts=5, top_k=2):
    x = torch.randn(tokens, hidden + 8).to(device, dtype)[:, :hidden]
    gate_up = (torch.randn(experts, 2 * inner, hidden) / hidden**0.5).to(device, dtype)
    down = (torch.randn(experts, hidden, inner) / inner**0.5).to(device, dtype)
    weights, ids = twins.moe_route(torch.randn(tokens, experts).to(device), top_k)
    return x, weights, ids, gate_up, down


@each_dtype
@parametrize_sample("act", ["silu", "gelu", "gelu_tanh", "clamped_swiglu"], every=2)
@pytest.mark.parametrize("biased", [False, True])
def test_experts_of_floats(ops, device, act, biased, dtype):
    x, weights, ids, gate_up, down = inputs_of(dtype, device)
    more = {"act": act, "alpha": 1.7, "limit": 0.8}
    if biased:
        more |= {
            "gate_up_bias": torch.randn(5, 48).to(device, dtype),
            "down_bias": torch.randn(5, 40).to(device, dtype),
        }
    stacks = ops["pack_experts"](gate_up, 2), ops["pack_experts"](down)
    actual = ops["fused_experts"](x, weights, ids, *stacks, **more)
    assert_close(actual, twins.fused_experts(x, weights, ids, gate_up, down, **more), 4)
    out = torch.empty_like(actual)
    assert ops["fused_experts"](x, weights, ids, *stacks, out=out, **more) is out
    assert torch.equal(out, actual)


def test_many_rows_of_few_experts_and_the_rows_beside(ops, device):
    x, weights, ids, *stacks = inputs_of(torch.float32, device, 70, experts=3)
    actual = ops["fused_experts"](x, weights, ids, *stacks)
    assert_close(actual, twins.fused_experts(x, weights, ids, *stacks), 4)
    some = slice(11, 13)
    few = ops["fused_experts"](x[some], weights[some], ids[some], *stacks)
    assert_close(few, actual[some])


CODED = [
    ("int4", 32, "bf16"), ("int8", 0, "bf16"), ("fp8", 128, "bf16"), ("e2m1", 16, "bf16"),
    ("int8", 0, "int8"), ("fp8", 128, "fp8"), ("int4", 32, "int8"),
]  # fmt: skip


@parametrize_sample(("form", "group", "activations"), CODED, every=2)
def test_experts_of_codes(ops, device, form, group, activations):
    tokens, hidden, inner, experts = 5, 256, 128, 3
    x, weights, ids, *_ = inputs_of(torch.float16, device, tokens, hidden, inner, experts)
    packed, plain = [], []
    for outputs, inputs, parts in ((2 * inner, hidden, 2), (hidden, inner, 1)):
        coded, rows = [], []
        for _ in range(experts):
            groups = inputs // group if group else 1
            scales = torch.rand(outputs, groups) * 0.01 + 0.002
            zeros, levels, stood = None, None, None
            if form == "fp8":
                values, scales = torch.randn(outputs, inputs).to(torch.float8_e4m3fn), scales * 5
            elif form == "int8":
                values, scales = (
                    torch.randint(-99, 99, (outputs, inputs)).to(torch.int8),
                    scales / 9,
                )
            else:
                values = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
                levels = 2 * E2M1 if form == "e2m1" else None
                if form == "int4":
                    stood = zeros = torch.randint(0, 16, (outputs, groups)).float()
            coded.append([
                None if part is None else part.to(device) for part in (values, scales, zeros)
            ])  # fmt: skip
            rows.append(Codes(values, scales, stood, None, levels).weight(torch.float32))
        packed.append(
            ops["pack_quantized_experts"](
                (tuple(one) for one in coded), experts, form, group, parts, activations
            )
        )
        plain.append(torch.stack(rows).to(device))
    assert packed[0].codes.rounded == ("" if activations == "bf16" else activations)
    actual = ops["fused_experts"](x, weights, ids, *packed).float()
    wanted = twins.fused_experts(x.float(), weights, ids, *plain)
    bound = 4e-3 if activations == "bf16" else 3e-2 if activations == "int8" else 8e-2
    torch.testing.assert_close(actual, wanted, rtol=bound, atol=bound * float(wanted.abs().max()))
    torch.testing.assert_close(packed[1][2].float(), plain[1][2], rtol=8e-3, atol=1e-6)


def test_stacks_of_another_provider_go_to_the_twin(ops, device):
    x, weights, ids, gate_up, down = inputs_of(torch.float32, device)
    stacks = list(gate_up), list(down)
    actual = ops["fused_experts"](x, weights, ids, *stacks)
    assert torch.equal(actual, twins.fused_experts(x, weights, ids, *stacks))


def test_what_does_not_fit_is_refused(ops, device):
    x, weights, ids, gate_up, down = inputs_of(torch.float32, device)
    with pytest.raises(ValueError, match="act must be one of"):
        ops["fused_experts"](x, weights, ids, gate_up, down, act="tanh")
    with pytest.raises(ValueError, match="stacks must be"):
        ops["fused_experts"](x, weights, ids, down, gate_up)
    with pytest.raises(ValueError, match="top_k must lie in 1..2"):
        ops["moe_route"](torch.zeros(1, 8), 3, groups=4)
    with pytest.raises(ValueError, match="expected 2 experts, not 1"):
        ops["pack_quantized_experts"](
            [(torch.zeros(4, 32, dtype=torch.int8), torch.ones(4, 1), None)], 2, "int8"
        )
