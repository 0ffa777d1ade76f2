"""Norms, activations, rotation and lookup against their twins."""

from __future__ import annotations

import pytest
import torch
from samples import parametrize_sample
from tests.plugins.kernels.cpu.close import assert_close, poisoned

from modulm.ops import twins
from modulm_towers.convolution import convolve

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "silu", "tanh")
SHAPES = ((0, 64), (1, 7), (3, 64), (5, 130), (33, 1024), (2, 4099))


def heads(dtype: torch.dtype) -> torch.Tensor:
    """[tokens, heads, size] as queries lie beside keys and values."""
    return torch.randn(5, 9 * 33).to(dtype).unflatten(-1, (9, 33))[:, 2:6]


def strided(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that are dense but not adjacent."""
    return torch.randn(rows, size + 3).to(dtype)[:, :size]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norms(ops, shape, dtype):
    rows, size = shape
    x, weight, bias = strided(rows, size, dtype), torch.randn(size), torch.randn(size)
    for w, b in ((weight, bias), (weight.to(dtype), bias.to(dtype))):
        for offset in (0.0, 1.0):
            out = poisoned(rows, size, dtype=dtype)
            assert ops["rms_norm"](x, w, 1e-6, out, offset) is out
            assert_close(out, twins.rms_norm(x, w, 1e-6, offset=offset))
        assert_close(
            ops["layer_norm"](x, w, b, 1e-5, poisoned(rows, size, dtype=dtype)),
            twins.layer_norm(x, w, b, 1e-5),
        )
        assert_close(ops["layer_norm"](x, w, None, 1e-5), twins.layer_norm(x, w, None, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_heads(ops, dtype):
    x, weight, each = heads(dtype), torch.randn(33), torch.randn(4, 33)
    assert_close(ops["rms_norm"](x, weight, 1e-6), twins.rms_norm(x, weight, 1e-6))
    for one in (weight, each, each.to(dtype), None):
        assert_close(ops["layer_norm"](x, one, None, 1e-5), twins.layer_norm(x, one, None, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_without_weights(ops, shape, dtype):
    x = strided(*shape, dtype)
    assert_close(ops["rms_norm"](x, None, 1e-6), twins.rms_norm(x, None, 1e-6))
    assert_close(ops["layer_norm"](x, None, None, 1e-5), twins.layer_norm(x, None, None, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_in_fp32(ops, dtype):
    x, weight, mine = strided(5, 130, dtype), torch.randn(130).to(dtype), torch.randn(5, 130)
    theirs = mine.clone()
    got = ops["add_rms_norm"](x, mine, weight, 1e-6)
    assert_close(got, twins.add_rms_norm(x, theirs, weight, 1e-6))
    assert got.dtype == dtype
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(ops, shape, dtype):
    x, weight = strided(*shape, dtype), torch.randn(shape[1]).to(dtype)
    mine = torch.randn(shape).to(dtype)
    theirs = mine.clone()
    got = ops["add_rms_norm"](x, mine, weight, 1e-6, poisoned(*shape, dtype=dtype))
    wanted = twins.add_rms_norm(x, theirs, weight, 1e-6)
    assert torch.equal(mine, theirs)
    assert_close(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gated(ops, shape, dtype):
    rows, size = shape
    x = strided(rows, 2 * size, dtype) * 4
    out = poisoned(rows, size, dtype=dtype)
    assert ops["act_and_mul"](x, "silu", out) is out
    assert_close(out, twins.act_and_mul(x, "silu"))
    for act in ACTIVATIONS:
        assert_close(ops["act_and_mul"](x, act), twins.act_and_mul(x, act))


def test_gated_extremes(ops):
    x = torch.tensor([[-200.0, -88.0, 0.0, 88.0, 200.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    for act in ("silu", "gelu_tanh"):
        assert_close(ops["act_and_mul"](x, act), twins.act_and_mul(x, act))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("size", "turned"), [(64, 64), (128, 64), (80, 20), (6, 6)])
def test_rotary(ops, size, turned, neox, dtype):
    table = torch.randn(50, turned)
    for tokens in (0, 1, 9):
        packed = torch.randn(tokens, 6 * size).to(dtype)
        mine, theirs = packed.clone(), packed.clone()
        positions = torch.randint(50, (tokens,))
        for rotary, x in ((ops["rotary"], mine), (twins.rotary, theirs)):
            heads = x.unflatten(-1, (6, size))
            rotary(heads[:, :4], heads[:, 4:5], positions, table, neox)
        assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(ops, dtype):
    table = torch.randn(100, 33).to(dtype)
    for count in (0, 1, 70):
        ids = torch.randint(100, (count,))
        out = poisoned(count, 33, dtype=dtype)
        assert torch.equal(ops["embedding"](ids, table, out), twins.embedding(ids, table))


def test_conversions_round_like_torch(ops):
    """Identity through a table of ones exercises every rounding: denormals, ties, overflow."""
    bits = torch.randint(-(2**31), 2**31 - 1, (64, 1024), dtype=torch.int32)
    x = bits.view(torch.float32)
    x = torch.where(x.isfinite() & (x.abs() > 1e-30) & (x.abs() < 1e30), x, 1.0)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = x.clamp(-6e4, 6e4).to(dtype)
        residual = narrow.clone()
        ops["add_rms_norm"](torch.zeros_like(narrow), residual, torch.ones(1024), 1e-6)
        assert torch.equal(residual, narrow)


def test_refusals_name_the_argument(ops):
    x, weight = torch.randn(4, 8), torch.randn(8)
    with pytest.raises(ValueError, match="^weight must be"):
        ops["rms_norm"](x, torch.randn(9), 1e-6)
    with pytest.raises(ValueError, match="^out must be"):
        ops["rms_norm"](x, weight, 1e-6, torch.empty(8, 4))
    with pytest.raises(ValueError, match="^x must be float32"):
        ops["rms_norm"](x.double(), weight, 1e-6)
    with pytest.raises(ValueError, match="^x must be .* dense rows"):
        ops["rms_norm"](torch.randn(8, 4).T, weight, 1e-6)
    with pytest.raises(ValueError, match="^ids must lie in"):
        ops["embedding"](torch.tensor([9]), torch.randn(9, 2))


def test_threads_do_not_change_results(ops, library):
    x, weight = torch.randn(500, 1024), torch.randn(1024)
    results = []
    for count in (1, 2, 3, 7):
        library.set_threads(count)
        results += [ops["act_and_mul"](ops["rms_norm"](x, weight, 1e-6), "silu") for _ in range(20)]
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 64), (100, 33), (130, 1024), (5, 7)])
def test_embedding_from_packed_weights(ops, dtype, shape):
    table, ids = torch.randn(shape).to(dtype), torch.randint(0, shape[0], (9,))
    packed = ops["pack_linear"](table)
    assert torch.equal(ops["embedding_packed"](ids, packed), table[ids])
    with pytest.raises(ValueError, match="ids must lie in"):
        ops["embedding_packed"](torch.tensor([0, shape[0]]), packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "group", "shape"), [
    ("int8", 16, (100, 48)), ("int8", 0, (5, 70)), ("int4", 32, (130, 1024)),
    ("int4", 16, (80, 176)),
])  # fmt: skip
def test_embedding_from_packed_codes(ops, dtype, name, group, shape):
    low, high, kind = (0, 16, torch.uint8) if name == "int4" else (-128, 128, torch.int8)
    codes, groups = torch.randint(low, high, shape, dtype=kind), shape[1] // group if group else 1
    scales, zeros = torch.rand(shape[0], groups), torch.rand(shape[0], groups) * 7
    packed = ops["pack_linear"](codes, name, group, scales, zeros)
    size = shape[1] // groups
    table = codes.float() - zeros.repeat_interleave(size, 1)
    table = (table * scales.repeat_interleave(size, 1)).to(dtype)
    ids = torch.randint(0, shape[0], (9,))
    assert_close(ops["embedding_packed"](ids, packed, dtype), table[ids])
    with pytest.raises(ValueError, match="ids must lie in"):
        ops["embedding_packed"](torch.tensor([0, shape[0]]), packed, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@parametrize_sample("shape", SHAPES, every=2)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations(ops, shape, dtype, act):
    x = strided(*shape, dtype) * 4
    assert_close(ops["activate"](x, act), twins.activate(x, act))


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_an_activation_does_not_depend_on_where_a_number_stands(ops, act):
    x = torch.randn(40, 7)
    whole = ops["activate"](x, act)
    assert torch.equal(ops["activate"](x.view(1, 280), act).view(40, 7), whole)
    assert torch.equal(ops["activate"](x[3:4, 2:5], act), whole[3:4, 2:5])


def test_an_activation_that_is_not_known(ops):
    with pytest.raises(ValueError, match="^act must be one of"):
        ops["activate"](torch.ones(1, 2), "swoosh")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_and_multiples(ops, shape, dtype):
    x, y, gate = strided(*shape, dtype), strided(*shape, dtype), strided(shape[0], 1, dtype)
    assert_close(ops["add"](x, y), twins.add(x, y))
    assert_close(ops["add"](x, y, gate), twins.add(x, y, gate))
    assert_close(ops["scale"](x, 2.5), twins.scale(x, 2.5))
    assert torch.equal(ops["clamp"](x, 0.5), twins.clamp(x, 0.5))
    assert torch.equal(ops["multiply"](x, y), twins.multiply(x, y))
    for act in ("silu", "sigmoid"):
        for first in (x, x.float()):
            assert_close(ops["multiply"](first, y, act), twins.multiply(first, y, act))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
def test_casts(ops, dtype, other):
    x = strided(5, 130, dtype)
    assert torch.equal(ops["cast"](x, other), twins.cast(x, other))


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_in_another_order(ops, dtype):
    x = strided(5, 130, dtype)
    order = torch.randperm(130)[:77]
    assert torch.equal(ops["take_columns"](x, order), twins.take_columns(x, order))
    with pytest.raises(ValueError, match="order must be int64"):
        ops["take_columns"](x, order.int())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_activation_with_constants(ops, shape, dtype):
    x = strided(*shape, dtype) * 4
    got = ops["activate"](x, "xielu", (0.7, 1.3))
    assert_close(got, twins.activate(x, "xielu", (0.7, 1.3)))
    with pytest.raises(ValueError, match="xielu got constants"):
        ops["activate"](x, "xielu")


def test_sums_of_what_does_not_fit(ops):
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match="^y must be"):
        ops["add"](x, x.bfloat16())
    with pytest.raises(ValueError, match="^gate must be"):
        ops["add"](x, x, torch.ones(2, 4))
    with pytest.raises(ValueError, match="^x must be"):
        ops["multiply"](x.half(), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_convolutions(ops, dtype):
    for weight, x in ((torch.randn(6, 4, 3), torch.randn(2, 4, 50)),
                      (torch.randn(6, 2, 3, 3), torch.randn(2, 4, 9, 11))):  # fmt: skip
        weight, x, bias = weight.to(dtype), x.to(dtype), torch.randn(6).to(dtype)
        groups = x.shape[1] // weight.shape[1]
        args = (weight.float(), bias.float(), 2, 1, groups)
        result = ops["convolve"](x, weight, bias, 2, 1, groups)
        assert result.dtype == dtype
        assert_close(result, convolve(x.float(), *args).to(dtype))
