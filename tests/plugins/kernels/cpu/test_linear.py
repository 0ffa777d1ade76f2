"""Linear layers on packed weights against the product with the weights they stand for."""

from __future__ import annotations

import pytest
import torch
from tests.plugins.kernels.cpu.close import assert_close, poisoned

from modulm_kernels_cpu.linear import FORMATS

SHAPES = ((1, 64, 64), (1, 1, 1), (3, 70, 33), (7, 130, 96), (20, 16, 256), (40, 200, 320))


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In fp64, from the bf16 values that the kernel multiplies."""
    wide = x.bfloat16().double() @ weight.double().T
    return (wide if bias is None else wide + bias.double()).to(x.dtype)


def check(ops, packed, weight, rows, dtype=torch.bfloat16):
    inputs = weight.shape[1]
    x = torch.randn(rows, inputs + 5).to(dtype)[:, :inputs]
    bias = torch.randn(weight.shape[0]).to(dtype)
    for b in (None, bias):
        out = poisoned(rows, weight.shape[0], dtype=dtype)
        assert ops["linear"](x, packed, b, out) is out
        assert_close(out, product(x, weight, b), factor=4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_bf16(ops, shape, dtype):
    rows, outputs, inputs = shape
    weight = torch.randn(outputs, inputs + 3).bfloat16()[:, :inputs]
    packed = ops["pack_linear"](weight, "bf16")
    assert torch.equal(ops["unpack_linear"](packed), weight)
    check(ops, packed, weight, rows, dtype)
    check(ops, packed, weight, 0, dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_bytes(ops, shape, name):
    rows, outputs, inputs = shape
    if name == "int8":
        codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    else:
        codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8)
        codes[codes & 0x7F == 0x7F] = 0
        codes = codes.view(torch.float8_e4m3fn)
    scales = torch.rand(outputs, 1) / (50 if name == "int8" else 100)
    packed = ops["pack_linear"](codes, name, scales=scales)
    check(ops, packed, codes.float() * scales, rows)


@pytest.mark.parametrize("group", [0, 32, 64, 128, 256])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 37])
@pytest.mark.parametrize("name", ["int4", "int8"])
def test_groups(ops, name, group, zeros, rows):
    outputs, inputs = 112, 512
    groups = inputs // group if group else 1
    if name == "int4":
        codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
        zero = torch.randint(0, 16, (outputs, groups)) if zeros else None
        centre = zero if zeros else torch.full((outputs, groups), 8)
    else:
        codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
        zero = torch.randint(-9, 9, (outputs, groups)) if zeros else None
        centre = zero if zeros else torch.zeros(outputs, groups)
    scales = (torch.rand(outputs, groups) / 20).bfloat16().float()
    packed = ops["pack_linear"](codes, name, group, scales, zero)
    repeat = inputs // groups
    weight = (codes.float() - centre.repeat_interleave(repeat, 1)) * scales.repeat_interleave(
        repeat, 1
    )
    check(ops, packed, weight, rows)
    assert_close(ops["unpack_linear"](packed), weight.bfloat16())


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_is_the_same_in_every_batch(ops, library, name):
    """Whatever the batch, its order, or the number of threads."""
    codes = torch.randn(200, 384) * 4
    if name == "int4":
        codes, scales = codes.clamp(0, 15).to(torch.uint8), torch.rand(200, 3)
        packed = ops["pack_linear"](codes, name, 128, scales, torch.randint(16, (200, 3)))
    else:
        kind = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[name]
        scales = None if name == "bf16" else torch.rand(200)
        packed = ops["pack_linear"](codes.to(kind), name, scales=scales)
    x = torch.randn(230, 384).bfloat16()
    whole = ops["linear"](x, packed)
    for count in (1, 2, 3):
        library.set_threads(count)
        for rows in (1, 2, 3, 5, 6, 7, 13, 16, 17, 31, 33, 100):
            start = 230 - rows
            assert torch.equal(ops["linear"](x[start:], packed), whole[start:])


def test_logits_in_fp32_and_higher_rank(ops):
    weight, x = torch.randn(50, 64).bfloat16(), torch.randn(2, 3, 64).bfloat16()
    packed = ops["pack_linear"](weight)
    out = poisoned(2, 3, 50, dtype=torch.float32)
    ops["linear"](x, packed, out=out)
    assert_close(out, (x.double() @ weight.double().T).float(), factor=4)


def test_plain_weights_go_to_torch(ops):
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    assert torch.equal(ops["linear"](x, weight), torch.nn.functional.linear(x, weight))


def test_refusals(ops):
    packed = ops["pack_linear"](torch.randn(8, 32).bfloat16())
    with pytest.raises(ValueError, match="^x must be"):
        ops["linear"](torch.randn(2, 31), packed)
    with pytest.raises(ValueError, match="^format must be"):
        ops["pack_linear"](torch.randn(8, 32), "int3")
    with pytest.raises(ValueError, match="^group 64 must divide"):
        ops["pack_linear"](torch.randn(8, 96), "int4", 64)
    with pytest.raises(ValueError, match="^scales must be"):
        ops["pack_linear"](torch.zeros(8, 32, dtype=torch.int8), "int8", scales=torch.ones(7))
