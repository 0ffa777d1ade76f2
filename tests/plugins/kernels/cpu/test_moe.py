"""Routing and fused experts against their twins, and packed stacks against what they stand for."""

from __future__ import annotations

import pytest
import torch
from samples import parametrize_sample
from tests.plugins.kernels.cpu.close import assert_close, poisoned

from modulm.ops import twins
from modulm_kernels_cpu.linear import BLOCKS, TABLES
from modulm_quant_gguf.types import NAMED, dequantize

FLOATS = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}

#: Half a unit in the last place, and what sums in fp32 add.
ROUNDING = {torch.float32: 1e-5, torch.float16: 6e-4, torch.bfloat16: 4e-3}

#: experts, hidden, inner
SIZES = ((4, 64, 64), (3, 40, 24), (5, 96, 70), (6, 200, 144))


#: format, groups, zero points, activations
CODED = {
    "int8": ("int8", 0, False, "bf16"),
    "int8-rounded": ("int8", 0, False, "int8"),
    "int8-groups": ("int8", 32, True, "int8"),
    "int4": ("int4", 32, True, "bf16"),
    "int4-rounded": ("int4", 32, True, "int8"),
    "int4-channels": ("int4", 0, False, "bf16"),
    "e2m1": ("e2m1", 32, False, "bf16"),
    "e2m1-16": ("e2m1", 16, False, "int8"),
    "iq4": ("iq4", 32, False, "int8"),
    "fp8": ("fp8", 0, False, "bf16"),
    "fp8-groups": ("fp8", 32, False, "bf16"),
}


def codes_of(form, outputs, inputs):
    """Codes and the numbers that they stand for."""
    if form == "int8":
        codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
        return codes, codes.float()
    if form == "fp8":
        codes = (torch.randn(outputs, inputs) * 40).to(torch.float8_e4m3fn)
        return codes, codes.float()
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    if form == "int4":
        return codes, codes.float()
    return codes, torch.tensor(TABLES[form]).float()[codes.int()]


def stack(ops, form, experts, parts, outputs, inputs):
    """A packed stack and the weights that it stands for."""
    front = (experts, parts * outputs)
    if form in FLOATS:
        weight = torch.randn(*front, inputs).mul_(inputs**-0.5).to(FLOATS[form])
        return ops["pack_experts"](weight, parts), weight
    form, group, zeros, activations = CODED[form]
    groups, coded, weights = inputs // group if group else 1, [], []
    powers = form == "e2m1" and group == 32
    for _ in range(experts):
        codes, numbers = codes_of(form, front[1], inputs)
        scales = (
            torch.rand(front[1], groups) / numbers.square().mean().sqrt() / inputs**0.5
        ).half()
        if powers:
            scales = torch.randint(115, 121, scales.shape, dtype=torch.uint8)
        points = torch.randint(0, 16, scales.shape) if zeros else None
        coded.append((codes, scales, points))
        wide = numbers.unflatten(1, (groups, -1))
        centre = 8 if form == "int4" else 0
        wide = wide - (centre if points is None else points[..., None])
        factors = torch.exp2(scales.float() - 127) if powers else scales.float()
        weights.append((wide * factors[..., None]).flatten(1))
    packed = ops["pack_quantized_experts"](iter(coded), experts, form, group, parts, activations)
    return packed, torch.stack(weights)


def choices(tokens, experts, top_k):
    logits = torch.randn(tokens, experts)
    return twins.moe_route(logits, top_k)


def expected(x, weights, ids, gate_up, down, **gate):
    """The twin in fp32, on inputs rounded to bf16."""
    return twins.fused_experts(
        x.bfloat16().float(), weights, ids, gate_up.float(), down.float(), **gate
    ).to(x.dtype)


@parametrize_sample("size", SIZES, every=2)
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


@parametrize_sample("size", SIZES, every=2)
@parametrize_sample("tokens", [0, 1, 2, 7, 70], every=2)
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
    with pytest.raises(ValueError, match="stacks must have the same format"):
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


@parametrize_sample("form", CODED, every=2)
@pytest.mark.parametrize("size", [(4, 64, 64), (5, 96, 160), (3, 320, 32)])
@parametrize_sample("tokens", [1, 3, 45], every=2)
def test_quantized(ops, form, size, tokens):
    experts, hidden, inner = size
    gate_up, wide_gate_up = stack(ops, form, experts, 2, inner, hidden)
    down, wide_down = stack(ops, form, experts, 1, hidden, inner)
    x = torch.randn(tokens, hidden).bfloat16()
    weights, ids = choices(tokens, experts, 2)
    got = ops["fused_experts"](x, weights, ids, gate_up, down)
    wanted = expected(x, weights, ids, wide_gate_up, wide_down)
    if gate_up.activations == "bf16":
        close_to_bf16(got, wanted)
    lost = (got.float() - wanted.float()).norm() / wanted.float().norm()
    assert lost < 0.03  # activations of eight bits, twice


def blocks_of(ops, name, experts, parts, outputs, inputs, activations):
    """A packed stack of ggml's blocks and its weights."""
    columns, size, _ = BLOCKS[name]
    blocks = torch.randint(0, 256, (experts, parts * outputs, inputs // columns, size))
    blocks = blocks.to(torch.uint8)
    floats = torch.full((*blocks.shape[:-1], 2), 2e-4).half().view(torch.uint8)
    first = size - 2 if name == "q6_k" else 0
    blocks[..., first : first + 4] = floats[..., : size - first]
    stored = blocks.flatten(2)
    packed = ops["pack_block_experts"](stored, name, parts, activations)
    return packed, dequantize(NAMED[name.upper()], stored)


@parametrize_sample("name", BLOCKS, every=2)
@parametrize_sample("tokens", [1, 3, 45], every=2)
@pytest.mark.parametrize("activations", ["int8", "bf16"])
def test_blocks_of_ggml(ops, name, tokens, activations):
    gate_up, wide_gate_up = blocks_of(ops, name, 4, 2, 256, 512, activations)
    down, wide_down = blocks_of(ops, name, 4, 1, 512, 256, activations)
    assert torch.equal(gate_up[2], wide_gate_up[2].bfloat16())
    x = torch.randn(tokens, 512).bfloat16() / 16
    weights, ids = choices(tokens, 4, 2)
    got = ops["fused_experts"](x, weights, ids, gate_up, down)
    wanted = expected(x, weights, ids, wide_gate_up, wide_down)
    if activations == "bf16":
        close_to_bf16(got, wanted)
    lost = (got.float() - wanted.float()).norm() / wanted.float().norm()
    assert lost < 0.03  # activations of eight bits, twice
    single = ops["fused_experts"](x[:1], weights[:1], ids[:1], gate_up, down)
    assert torch.equal(single, got[:1])


def test_stacks_of_two_formats(ops):
    """What a method does where the inner size is no whole groups."""
    x, (weights, ids) = torch.randn(9, 128).bfloat16(), choices(9, 5, 3)
    for first, second in (("int4", "int8"), ("bf16", "int4"), ("int4", "bf16"), ("fp8", "int8")):
        gate_up, wide_gate_up = stack(ops, first, 5, 2, 96, 128)
        down, wide_down = stack(ops, second, 5, 1, 128, 96)
        got = ops["fused_experts"](x, weights, ids, gate_up, down)
        close_to_bf16(got, expected(x, weights, ids, wide_gate_up, wide_down))


@parametrize_sample("form", [*FLOATS, *CODED], every=2)
@pytest.mark.parametrize(("parts", "outputs", "inputs"), [(2, 40, 64), (1, 130, 96), (2, 64, 32)])
def test_one_expert_back(ops, form, parts, outputs, inputs):
    packed, weight = stack(ops, form, 3, parts, outputs, inputs)
    assert len(packed) == 3
    for expert in range(3):
        wanted = weight[expert].to(FLOATS.get(form, torch.bfloat16))
        assert torch.equal(packed[expert], wanted)


@pytest.mark.parametrize("form", [*FLOATS, *CODED])
def test_an_expert_moves_to_another_stack(ops, form):
    """Into room that the other has made for it; both then compute with it alike."""
    there, _ = stack(ops, form, 2, 2, 96, 160)
    down, _ = stack(ops, form, 4, 1, 160, 96)
    here, _ = stack(ops, form, 3, 2, 96, 160)
    weights_before = [here[expert].clone() for expert in range(3)]
    here.grow(4)
    here.put(3, [piece.clone() for piece in there.memory(1)])
    assert len(here) == 4
    assert all(torch.equal(here[expert], wanted) for expert, wanted in enumerate(weights_before))
    assert torch.equal(here[3], there[1])
    there.grow(4)
    there.put(3, [piece.clone() for piece in here.memory(3)])
    x = torch.randn(5, 160).to(FLOATS.get(form, torch.bfloat16))
    weights, ids = torch.ones(5, 1), torch.full((5, 1), 3)
    out = [ops["fused_experts"](x, weights, ids, one, down, act="silu") for one in (here, there)]
    assert torch.equal(*out)


@pytest.mark.parametrize("scale", [1, 2, 127, 250, 251])
def test_exponents_at_their_ends(ops, scale):
    codes = torch.arange(32, dtype=torch.uint8).remainder(16).expand(16, 32).contiguous()
    scales = torch.full((16, 1), scale, dtype=torch.uint8)
    packed = ops["pack_quantized_experts"]([(codes, scales, None)], 1, "e2m1", 32)
    numbers = torch.tensor(TABLES["e2m1"]).double()[codes[3].int()]
    assert torch.equal(packed[0][3].double(), torch.ldexp(numbers, torch.tensor(scale - 127)))


@parametrize_sample("form", [*FLOATS, *CODED], every=8)
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


@pytest.mark.parametrize("form", ["bf16", "int8-rounded", "int4-rounded", "fp8"])
def test_panels_read_in_one_stream_give_the_same(ops, library, form):
    """One token has tasks of five panels and of four; 64 tokens have tasks of one panel."""
    library.set_threads(1)
    gate_up, _ = stack(ops, form, 8, 2, 576, 320)
    down, _ = stack(ops, form, 8, 1, 320, 576)
    x = torch.randn(64, 320).bfloat16()
    weights, ids = choices(64, 8, 8)
    together = ops["fused_experts"](x, weights, ids, gate_up, down)
    for i in range(0, 64, 21):
        one = slice(i, i + 1)
        alone = ops["fused_experts"](x[one], weights[one], ids[one], gate_up, down)
        assert torch.equal(alone[0], together[i])


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
    codes, scales = torch.zeros(2, 32, dtype=torch.uint8), torch.ones(2, 1)
    pack = ops["pack_quantized_experts"]
    with pytest.raises(ValueError, match="^expected 2 experts"):
        pack([(codes, scales, None)], 2, "int4", 32)
    with pytest.raises(ValueError, match="^scales must have the same shape"):
        pack([(codes, scales, None), (codes, scales.half(), None)], 2, "int4", 32)
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
        arguments = {**routing, "bias": bias}
        weights, ids = ops["moe_route"](logits, **arguments)
        wanted_weights, wanted_ids = twins.moe_route(logits, **arguments)
        assert torch.equal(ids, wanted_ids)
        assert_close(weights, wanted_weights)


def test_equal_scores_give_the_first_expert(ops):
    _, ids = ops["moe_route"](torch.zeros(2, 40), 3)
    assert ids.tolist() == [[0, 1, 2]] * 2
