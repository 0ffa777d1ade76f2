"""Routing and fused experts against their twins, and packed stacks against what they stand for."""

from __future__ import annotations

import pytest
import torch
from tests.plugins.kernels.cpu.close import assert_close, poisoned

from modulm.ops import twins

MXFP4 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

FLOATS = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}

#: Half a unit in the last place, and what sums in fp32 add.
ROUNDING = {torch.float32: 1e-5, torch.float16: 6e-4, torch.bfloat16: 4e-3}

#: experts, hidden, inner
SIZES = ((4, 64, 64), (3, 40, 24), (5, 96, 70), (6, 200, 144))


def stack(ops, form, experts, parts, outputs, inputs):
    """A packed stack and the bf16 weights that it stands for."""
    front = (experts, parts * outputs)
    if form in FLOATS:
        weight = torch.randn(*front, inputs).mul_(inputs**-0.5).to(FLOATS[form])
        return ops["pack_experts"](weight, parts), weight
    if form == "int8":
        codes = torch.randint(-128, 128, (*front, inputs), dtype=torch.int8)
        scales = torch.rand(front) * inputs**-0.5 / 64
        packed = ops["pack_quantized_experts"](codes, "int8", parts, scales)
        return packed, codes * scales[..., None]
    codes = torch.randint(0, 16, (*front, inputs), dtype=torch.uint8)
    nibbles = codes[..., ::2] | codes[..., 1::2] << 4
    groups = inputs // 32
    if form == "mxfp4":
        scales = torch.randint(115, 125, (*front, groups), dtype=torch.uint8)
        weight = MXFP4[codes.long()] * 2.0 ** (scales.float() - 127).repeat_interleave(32, 2)
        return ops["pack_quantized_experts"](nibbles, "mxfp4", parts, scales), weight
    scales = (torch.rand(*front, groups) * inputs**-0.5 / 4).bfloat16().float()
    zeros = torch.randint(0, 16, (*front, groups), dtype=torch.uint8)
    packed = ops["pack_quantized_experts"](nibbles, "int4", parts, scales, zeros)
    centred = codes.float() - zeros.repeat_interleave(32, 2)
    return packed, centred * scales.repeat_interleave(32, 2)


def choices(tokens, experts, top_k):
    logits = torch.randn(tokens, experts)
    return twins.moe_route(logits, top_k)


def expected(x, weights, ids, gate_up, down, **gate):
    """The twin in fp32, on inputs rounded to bf16."""
    return twins.fused_experts(
        x.bfloat16().float(), weights, ids, gate_up.float(), down.float(), **gate
    ).to(x.dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_bf16(ops, size, tokens, dtype):
    experts, hidden, inner = size
    gate_up, wide_gate_up = stack(ops, "bf16", experts, 2, inner, hidden)
    down, wide_down = stack(ops, "bf16", experts, 1, hidden, inner)
    x = torch.randn(tokens, hidden + 5).to(dtype)[:, :hidden]
    weights, ids = choices(tokens, experts, 2)
    out = poisoned(tokens, hidden, dtype=dtype)
    assert ops["fused_experts"](x, weights, ids, gate_up, down, out=out) is out
    close_to_bf16(out, expected(x, weights, ids, wide_gate_up, wide_down))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 70])
@pytest.mark.parametrize("form", ["fp32", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_wide_floats(ops, size, tokens, form, dtype):
    experts, hidden, inner = size
    gate_up, wide_gate_up = stack(ops, form, experts, 2, inner, hidden)
    down, wide_down = stack(ops, form, experts, 1, hidden, inner)
    x = torch.randn(tokens, hidden + 5).to(dtype)[:, :hidden]
    weights, ids = choices(tokens, experts, 2)
    out = poisoned(tokens, hidden, dtype=dtype)
    ops["fused_experts"](x, weights, ids, gate_up, down, out=out)
    wanted = twins.fused_experts(
        x.double(), weights, ids, wide_gate_up.double(), wide_down.double()
    )
    torch.testing.assert_close(out.double(), wanted, rtol=ROUNDING[dtype], atol=1e-5)


def test_stacks_that_are_not_alike_are_refused(ops):
    gate_up, _ = stack(ops, "fp32", 2, 2, 32, 64)
    down, _ = stack(ops, "bf16", 2, 1, 64, 32)
    weights, ids = choices(1, 2, 1)
    with pytest.raises(ValueError, match="stacks must be alike"):
        ops["fused_experts"](torch.randn(1, 64), weights, ids, gate_up, down)


def close_to_bf16(got, wanted):
    """What the first product gives is rounded to bf16 whatever the dtype of the result."""
    assert got.dtype == wanted.dtype
    assert_close(got.bfloat16(), wanted.bfloat16(), factor=2)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("bias", [torch.bfloat16, torch.float32])
def test_gates_and_biases(ops, act, tokens, bias):
    gate_up, wide_gate_up = stack(ops, "bf16", 5, 2, 40, 64)
    down, wide_down = stack(ops, "bf16", 5, 1, 64, 40)
    biases = torch.randn(5, 80).to(bias), torch.randn(5, 64).to(bias)
    x = torch.randn(tokens, 64).bfloat16()
    weights, ids = choices(tokens, 5, 3)
    gate = {"act": act, "alpha": 1.7, "limit": 0.8}
    got = ops["fused_experts"](
        x, weights, ids, gate_up, down, gate_up_bias=biases[0], down_bias=biases[1], **gate
    )
    wanted = expected(
        x, weights, ids, wide_gate_up, wide_down,
        gate_up_bias=biases[0].float(), down_bias=biases[1].float(), **gate,
    )  # fmt: skip
    close_to_bf16(got, wanted)


@pytest.mark.parametrize("form", ["int8", "int4", "mxfp4"])
@pytest.mark.parametrize("size", [(4, 64, 64), (5, 96, 160), (3, 320, 32)])
@pytest.mark.parametrize("tokens", [1, 3, 45])
def test_quantized(ops, form, size, tokens):
    experts, hidden, inner = size
    gate_up, wide_gate_up = stack(ops, form, experts, 2, inner, hidden)
    down, wide_down = stack(ops, form, experts, 1, hidden, inner)
    x = torch.randn(tokens, hidden).bfloat16()
    weights, ids = choices(tokens, experts, 2)
    got = ops["fused_experts"](x, weights, ids, gate_up, down)
    close_to_bf16(got, expected(x, weights, ids, wide_gate_up, wide_down))


@pytest.mark.parametrize("form", [*FLOATS, "int8", "int4", "mxfp4"])
@pytest.mark.parametrize(("parts", "outputs", "inputs"), [(2, 40, 64), (1, 130, 96), (2, 64, 32)])
def test_one_expert_back(ops, form, parts, outputs, inputs):
    packed, weight = stack(ops, form, 3, parts, outputs, inputs)
    assert len(packed) == 3
    for expert in range(3):
        assert torch.equal(packed[expert], weight[expert].to(FLOATS.get(form, torch.bfloat16)))


def test_mxfp4_is_the_bf16_model_it_stands_for(ops):
    """Scales are powers of 2: the same products and sums, to the last bit."""
    pairs = [stack(ops, "mxfp4", 6, *sizes) for sizes in ((2, 96, 128), (1, 128, 96))]
    packed = [each for each, _ in pairs]
    plain = [ops["pack_experts"](w.bfloat16(), p) for (_, w), p in zip(pairs, (2, 1), strict=True)]
    for tokens in (1, 5, 100):
        x, (weights, ids) = torch.randn(tokens, 128).bfloat16(), choices(tokens, 6, 3)
        found = [ops["fused_experts"](x, weights, ids, *each) for each in (packed, plain)]
        assert torch.equal(*found)


@pytest.mark.parametrize("scale", [2, 3, 127, 250, 252])
def test_mxfp4_scales_at_their_ends(ops, scale):
    codes = torch.arange(32, dtype=torch.uint8).remainder(16)
    nibbles = (codes[::2] | codes[1::2] << 4).expand(1, 16, 16).contiguous()
    scales = torch.full((1, 16, 1), scale, dtype=torch.uint8)
    packed = ops["pack_quantized_experts"](nibbles, "mxfp4", 1, scales)
    wanted = torch.ldexp(MXFP4[codes.long()].double(), torch.tensor(scale - 127))
    assert torch.equal(packed[0][3].double(), wanted)


@pytest.mark.parametrize("form", [*FLOATS, "int8", "int4", "mxfp4"])
def test_a_token_is_the_same_in_every_batch(ops, library, form):
    """Whatever its neighbours choose, and whatever the number of threads."""
    gate_up, _ = stack(ops, form, 6, 2, 96, 160)
    down, _ = stack(ops, form, 6, 1, 160, 96)
    dtype = FLOATS.get(form, torch.bfloat16)
    x, (weights, ids) = torch.randn(600, 160).to(dtype), choices(600, 6, 2)
    ids[:300] = ids[:1]  # 300 tokens for two experts
    whole = ops["fused_experts"](x, weights, ids, gate_up, down)
    for count in (1, 2, 3):
        library.set_threads(count)
        for start, rows in ((0, 1), (599, 1), (310, 2), (4, 7), (290, 33), (150, 290), (85, 515)):
            part = slice(start, start + rows)
            got = ops["fused_experts"](x[part], weights[part], ids[part], gate_up, down)
            assert torch.equal(got, whole[part])


def test_all_tokens_one_expert(ops):
    gate_up, wide_gate_up = stack(ops, "bf16", 8, 2, 64, 64)
    down, wide_down = stack(ops, "bf16", 8, 1, 64, 64)
    x = torch.randn(130, 64).bfloat16()
    weights, ids = torch.rand(130, 1), torch.full((130, 1), 5)
    got = ops["fused_experts"](x, weights, ids, gate_up, down)
    close_to_bf16(got, expected(x, weights, ids, wide_gate_up, wide_down))


def test_stacks_that_are_not_packed_go_to_the_twin(ops):
    gate_up, down = torch.randn(3, 16, 8), torch.randn(3, 8, 8)
    x, (weights, ids) = torch.randn(4, 8), choices(4, 3, 2)
    got = ops["fused_experts"](x, weights, ids, gate_up, down)
    assert torch.equal(got, twins.fused_experts(x, weights, ids, gate_up, down))


def test_refusals(ops):
    gate_up, _ = stack(ops, "bf16", 3, 2, 32, 32)
    down, _ = stack(ops, "bf16", 3, 1, 32, 32)
    x, (weights, ids) = torch.randn(2, 32).bfloat16(), choices(2, 3, 2)
    run = ops["fused_experts"]
    with pytest.raises(ValueError, match="^act must be"):
        run(x, weights, ids, gate_up, down, act="relu")
    with pytest.raises(ValueError, match="^gate_up is"):
        run(x, weights, ids, down, down)
    for wrong in (3, -1):
        with pytest.raises(ValueError, match="^ids must lie"):
            run(x, weights, torch.full_like(ids, wrong), gate_up, down)
    with pytest.raises(ValueError, match="^scales must lie below"):
        ops["pack_quantized_experts"](
            torch.zeros(1, 2, 16, dtype=torch.uint8), "mxfp4", 1,
            torch.full((1, 2, 1), 255, dtype=torch.uint8),
        )  # fmt: skip
    with pytest.raises(ValueError, match="^top_k must lie"):
        ops["moe_route"](torch.randn(2, 4), 3, groups=2)


ROUTINGS = (
    {"top_k": 1},
    {"top_k": 3, "renormalise": False, "scale": 2.5},
    {"top_k": 12},
    {"top_k": 2, "scoring": "sigmoid", "scale": 0.5},
    {"top_k": 4, "scoring": "sigmoid", "bias": True, "groups": 4, "top_groups": 2,
     "group_score": "top2", "scale": 2.5},
    {"top_k": 3, "renormalise": False, "groups": 3, "top_groups": 1},
)  # fmt: skip


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_route(ops, routing, dtype):
    for rows in (1, 50, 0):
        # Distinct values: what is chosen among equals is nobody's business.
        logits = torch.randn(rows, 15)[:, :12].argsort(-1).sub(5).div(4).to(dtype)
        bias = torch.randn(12) / 10 if routing.get("bias") else None
        given = {**routing, "bias": bias}
        weights, ids = ops["moe_route"](logits, **given)
        wanted_weights, wanted_ids = twins.moe_route(logits, **given)
        assert torch.equal(ids, wanted_ids)
        assert_close(weights, wanted_weights)


def test_equal_scores_give_the_first_expert(ops):
    _, ids = ops["moe_route"](torch.zeros(2, 40), 3)
    assert ids.tolist() == [[0, 1, 2]] * 2
