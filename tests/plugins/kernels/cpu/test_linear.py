"""Linear layers on packed weights against the product with the weights they stand for."""

from __future__ import annotations

import pytest
import torch
from samples import parametrize_sample
from tests.plugins.kernels.cpu.close import assert_close, poisoned

from modulm_kernels_cpu.linear import ACTIVATIONS, BLOCKS, FORMATS, TABLES
from modulm_quant_gguf.types import NAMED, dequantize
from modulm_quantized import Scheme, round_weight

SHAPES = ((1, 64, 64), (1, 1, 1), (3, 70, 33), (7, 130, 96), (20, 16, 256), (40, 200, 320))


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In fp64."""
    wide = x.double() @ weight.double().T
    return wide if bias is None else wide + bias.double()


def rounded(x: torch.Tensor, weight_format: str, activations: str) -> torch.Tensor:
    """What the kernel multiplies in x's place: bf16 values, or whole numbers times a scale per
    row and 256 inputs."""
    if weight_format in ("bf16", "fp8"):
        return x.bfloat16()
    if weight_format in ("fp32", "fp16"):
        return x
    largest = 127 if activations == "int8" else 127 * 256 + 127
    parts = []
    for part in x.double().split(256, dim=1):
        scale = part.abs().amax(1, keepdim=True) / largest
        parts.append((part / scale.clamp(min=1e-30)).round() * scale)
    return torch.cat(parts, dim=1)


def check(ops, packed, weight, rows, dtype=torch.bfloat16):
    inputs = weight.shape[1]
    x = torch.randn(rows, inputs + 5).to(dtype)[:, :inputs]
    bias = torch.randn(weight.shape[0]).to(dtype)
    seen = rounded(x, packed.format, packed.activations)
    for b in (None, bias):
        out = poisoned(rows, weight.shape[0], dtype=dtype)
        assert ops["linear"](x, packed, b, out) is out
        expected = product(seen, weight, b).to(dtype)
        assert_close(out, expected, factor=6 if packed.activations == "int8" else 4)


@parametrize_sample("shape", SHAPES, every=2)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_floats(ops, shape, kind, dtype):
    rows, outputs, inputs = shape
    weight = torch.randn(outputs, inputs + 3).to(kind)[:, :inputs]
    packed = ops["pack_linear"](weight)
    assert torch.equal(ops["unpack_linear"](packed), weight)
    check(ops, packed, weight, rows, dtype)
    check(ops, packed, weight, 0, dtype)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [(0, 200), (0, 64), (64, 192), (10, 90), (130, 200), (70, 71)])
def test_overwritten_floats(ops, kind, rows):
    """Any rows are replaced in place: whole panels, parts of one, and the last, narrower one."""
    weight = torch.randn(200, 96)
    packed = ops["pack_linear"](weight.to(kind))
    before, first, stop = packed.data.data_ptr(), *rows
    new = torch.randn(stop - first, 100)[:, :96].bfloat16()
    ops["overwrite_linear"](packed, first, new)
    expected = weight.to(kind)
    expected[first:stop] = new
    assert packed.data.data_ptr() == before
    assert torch.equal(packed.data, ops["pack_linear"](expected).data)
    with pytest.raises(ValueError, match="rows 190 to 254 are not within 200"):
        ops["overwrite_linear"](packed, 190, torch.zeros(64, 96))
    blank = ops["blank_linear"](200, 96, kind)
    ops["overwrite_linear"](blank, 0, expected[:stop])
    ops["overwrite_linear"](blank, stop, expected[stop:])
    assert torch.equal(blank.data, packed.data)
    assert {k: v for k, v in blank.fields().items() if k != "data"} == {
        k: v for k, v in packed.fields().items() if k != "data"
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(256, 16, 64), (300, 200, 700), (530, 112, 1030), (20, 80, 6200)]
)
def test_many_rows(ops, shape, dtype):
    """Several blocks of rows and chunks of k, panels of every kind of width, edges on all sides."""
    rows, outputs, inputs = shape
    weight = torch.randn(outputs, inputs).bfloat16()
    check(ops, ops["pack_linear"](weight), weight, rows, dtype)


def codes_of(name, outputs, inputs):
    if name == "int4" or name in TABLES:
        return torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    if name == "int8":
        return torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    return codes.view(torch.float8_e4m3fn)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("name", "activations"),
    [("fp8", "bf16"), ("int8", "bf16"), ("int8", "int8"), ("int4", "bf16"), ("int4", "int8")],
)
def test_a_scale_per_output(ops, shape, name, activations):
    rows, outputs, inputs = shape
    codes = codes_of(name, outputs, inputs)
    scales = torch.rand(outputs, 1) / {"int8": 50, "fp8": 100, "int4": 6}[name]
    packed = ops["pack_linear"](codes, name, scales=scales, activations=activations)
    check(ops, packed, (codes.float() - (8 if name == "int4" else 0)) * scales, rows)


@parametrize_sample("group", [0, 16, 32, 64, 128, 256], every=2)
@pytest.mark.parametrize("zeros", [False, True])
@parametrize_sample("rows", [1, 5, 37], every=2)
@pytest.mark.parametrize("name", ["int4", "int8"])
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_groups(ops, name, group, zeros, rows, activations):
    outputs, inputs = 112, 768
    groups = inputs // group if group else 1
    codes = codes_of(name, outputs, inputs)
    low, high, centre = (0, 16, 8) if name == "int4" else (-9, 9, 0)
    zero = torch.randint(low, high, (outputs, groups)) if zeros else None
    scales = torch.rand(outputs, groups) / (20 if name == "int4" else 200)
    packed = ops["pack_linear"](codes, name, group, scales, zero, activations)
    repeat = inputs // groups
    weight = codes.float() - (centre if zero is None else zero.repeat_interleave(repeat, 1))
    weight = weight * scales.repeat_interleave(repeat, 1)
    check(ops, packed, weight, rows)
    assert_close(ops["unpack_linear"](packed), weight.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("inputs", [32, 96, 160])
def test_scales_in_their_own_dtype(ops, dtype, inputs):
    """And rows that end within the 64 k of a block; zeros need not be whole."""
    codes, scales = codes_of("int4", 80, inputs), (torch.rand(80, inputs // 32) / 20).to(dtype)
    zeros = (torch.rand(80, inputs // 32) * 15).to(dtype).float()
    packed = ops["pack_linear"](codes, "int4", 32, scales, (zeros - 8).to(dtype).float() + 8)
    assert packed.scales.dtype == packed.zeros.dtype == dtype
    rounded_zeros = (zeros - 8).to(dtype).float() + 8
    weight = (
        codes.float() - rounded_zeros.repeat_interleave(32, 1)
    ) * scales.float().repeat_interleave(32, 1)
    for rows in (1, 20):
        check(ops, packed, weight, rows)


@pytest.mark.parametrize("name", ["int4", "int8"])
@pytest.mark.parametrize("inputs", [16, 48, 336])
def test_groups_of_16_end_anywhere(ops, name, inputs):
    codes, scales = codes_of(name, 80, inputs), torch.rand(80, inputs // 16) / 100
    packed = ops["pack_linear"](codes, name, 16, scales)
    weight = (codes.float() - (8 if name == "int4" else 0)) * scales.repeat_interleave(16, 1)
    for rows in (1, 4, 20):
        check(ops, packed, weight, rows)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("group", [0, 16, 32, 256])
@parametrize_sample("rows", [1, 5, 37], every=2)
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_codes_that_stand_for_other_numbers(ops, name, group, rows, activations):
    outputs, inputs = 112, 768
    groups = inputs // group if group else 1
    codes, scales = codes_of(name, outputs, inputs), torch.rand(outputs, groups) / 200
    if group == 32:
        scales = torch.randint(112, 118, (outputs, groups), dtype=torch.uint8)
    packed = ops["pack_linear"](codes, name, group, scales, None, activations)
    wide = scales.float() if group != 32 else torch.exp2(scales.float() - 127)
    numbers = torch.tensor(TABLES[name], dtype=torch.float32)[codes.int()]
    weight = numbers * wide.repeat_interleave(inputs // groups, 1)
    check(ops, packed, weight, rows)
    assert_close(ops["unpack_linear"](packed), weight.bfloat16())
    ids = torch.tensor([3, 111, 0])
    rows_of = ops["embedding_packed"](ids, packed, torch.float32)
    torch.testing.assert_close(rows_of, weight[ids])


def stored_blocks(name, outputs, inputs):
    """Rows of blocks of any bits with floats of a usual size, and what ggml makes of them."""
    columns, size, _ = BLOCKS[name]
    blocks = torch.randint(0, 256, (outputs, inputs // columns, size), dtype=torch.uint8)
    floats = torch.randn(outputs, inputs // columns, 2) / (4000 if name == "q6_k" else 1000)
    floats = floats.half().view(torch.uint8)
    if name == "q6_k":
        blocks[..., -2:] = floats[..., :2]
    else:
        blocks[..., :4] = floats
    stored = blocks.flatten(1)
    return stored, dequantize(NAMED[name.upper()], stored)


@pytest.mark.parametrize("name", BLOCKS)
@parametrize_sample("rows", [1, 2, 5, 37], every=2)
@parametrize_sample("size", [(112, 768), (16, 256), (130, 512)], every=2)
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_blocks_of_ggml(ops, name, rows, size, activations):
    """In as many bits as in the file, and the very numbers that ggml has."""
    stored, weight = stored_blocks(name, *size)
    packed = ops["pack_blocks"](stored, name, activations)
    padded = -(-size[0] // 16) * 16
    assert packed.bytes == padded * stored.shape[1]
    check(ops, packed, weight, rows)
    assert torch.equal(ops["unpack_linear"](packed), weight.bfloat16())
    ids = torch.tensor([3, size[0] - 1, 0])
    assert torch.equal(ops["embedding_packed"](ids, packed, torch.float32), weight[ids])


@pytest.mark.parametrize("name", BLOCKS)
def test_one_digit_in_the_blocks_of_256_that_ggml_rounds(ops, name):
    """Exact where activations are whole numbers: only these are rounded, in steps of a block."""
    stored, weight = stored_blocks(name, 80, 512)
    x = torch.randint(-127, 128, (9, 512)).float()
    x[:, ::256] = 127  # the largest of each step, so that the scale is 1
    out = torch.empty(9, 80)
    ops["linear"](x, ops["pack_blocks"](stored, name, "int8"), None, out)
    wanted = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_blocks_that_are_none_are_refused(ops):
    stored = torch.zeros(16, 144, dtype=torch.uint8)
    with pytest.raises(ValueError, match="format must be one of q4_k, q5_k, q6_k"):
        ops["pack_blocks"](stored, "int4")
    with pytest.raises(ValueError, match="a multiple of 210"):
        ops["pack_blocks"](stored, "q6_k")
    with pytest.raises(ValueError, match="activations must be"):
        ops["pack_blocks"](stored, "q4_k", "int4")
    with pytest.raises(ValueError, match="format must be"):
        ops["pack_linear"](stored, "q4_k")


@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_rounding_is_the_twins_to_the_bit(ops, group, dtype):
    weight = torch.randn(70, 512 + 3).mul(torch.rand(70, 1) / 10).to(dtype)[:, :512]
    weight[3], weight[4], weight[5] = 0, weight[4].abs(), -weight[5].abs()
    scheme = Scheme("int4", columns=group)
    wanted = round_weight(weight, scheme)
    codes_found = round_weight(weight, scheme, (), ops["round_groups"])
    for mine, theirs in zip(
        (codes_found.values, codes_found.scales, codes_found.zeros),
        (wanted.values, wanted.scales, wanted.zeros),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


def test_floats_of_eight_bits_have_larger_groups(ops):
    with pytest.raises(ValueError, match="groups of 16 are not for fp8"):
        ops["pack_linear"](codes_of("fp8", 16, 64), "fp8", 16, torch.rand(16, 4))


def test_blocks_of_fp8(ops):
    codes, scales = codes_of("fp8", 80, 256), torch.rand(80, 2) / 100
    packed = ops["pack_linear"](codes, "fp8", 128, scales)
    for rows in (1, 13, 20):
        check(ops, packed, codes.float() * scales.repeat_interleave(128, 1), rows)
    x = torch.randn(20, packed.inputs).bfloat16()
    whole = ops["linear"](x, packed)
    for rows in (1, 6, 7, 18, 19):
        assert torch.equal(ops["linear"](x[:rows], packed), whole[:rows])


ROUNDED = ("int8", "int4", "iq4", *BLOCKS)
FORMS = [(name, "bf16") for name in FORMATS] + [(name, "int8") for name in ROUNDED]


@parametrize_sample(("name", "activations"), FORMS, every=4)
def test_a_row_is_the_same_in_every_batch(ops, library, name, activations):
    """Whatever the batch, its order, or the number of threads."""
    codes = torch.randn(200, 768) * 4
    if name == "int4":
        codes, scales = codes.clamp(0, 15).to(torch.uint8), torch.rand(200, 6)
        zeros = torch.rand(200, 6) * 15
        packed = ops["pack_linear"](codes, name, 128, scales, zeros, activations)
    elif name in TABLES:
        codes, scales = codes_of(name, 200, 768), torch.rand(200, 24)
        packed = ops["pack_linear"](codes, name, 32, scales, None, activations)
    elif name in BLOCKS:
        packed = ops["pack_blocks"](stored_blocks(name, 200, 768)[0], name, activations)
    else:
        kind = {
            "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
            "int8": torch.int8, "fp8": torch.float8_e4m3fn,
        }[name]  # fmt: skip
        scales = torch.rand(200) if name in ("int8", "fp8") else None
        packed = ops["pack_linear"](codes.to(kind), name, scales=scales, activations=activations)
    dtype = torch.float32 if name in ("fp32", "fp16") else torch.bfloat16
    x = torch.randn(300, 768).to(dtype)
    whole = ops["linear"](x, packed)
    for count in (1, 2, 3):
        library.set_threads(count)
        for rows in (1, 2, 3, 5, 6, 7, 13, 16, 17, 31, 33, 100, 257):
            start = 300 - rows
            assert torch.equal(ops["linear"](x[start:], packed), whole[start:])


@pytest.mark.parametrize(("group", "inputs"), [(16, 400), (32, 288), (64, 704), (256, 768)])
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_a_row_with_whole_zeros_is_the_same_in_every_batch(ops, group, inputs, activations):
    """Few rows subtract them, sums of many begin where they put them."""
    groups = -(-inputs // group)
    codes = torch.randint(0, 16, (112, inputs), dtype=torch.uint8)
    scales = torch.rand(112, groups) / 64
    zeros = torch.randint(0, 16, (112, groups)).float()
    zeros[:16] = torch.arange(16)[:, None]
    packed = ops["pack_linear"](codes, "int4", group, scales, zeros, activations)
    x = torch.randn(64, inputs).bfloat16()
    x[0] = 1.0  # the largest sums of codes
    x[1] = -1.0
    rows = torch.cat([ops["linear"](row[None], packed) for row in x])
    for count in (7, 8, 9, 10, 11, 12, 13, 16, 17, 64):
        assert torch.equal(ops["linear"](x[:count], packed), rows[:count])
    weight = (codes - zeros.repeat_interleave(group, 1)[:, :inputs]) * (
        scales.repeat_interleave(group, 1)[:, :inputs]
    )
    check(ops, packed, weight, 16)


@pytest.mark.parametrize("outputs", [16, 48, 64])
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_the_largest_sums_of_integers(ops, outputs, activations):
    """Sums of 256 k at the limits of int32 with 16 bits, which whole zeros leave exact."""
    codes = torch.full((outputs, 512), -128, dtype=torch.int8)
    codes[::2] = 127
    scales, zeros = torch.ones(outputs, 2), torch.full((outputs, 2), 3.0)
    x = torch.ones(33, 512).bfloat16()
    x[1::2] = -1
    for group, points in ((0, None), (256, zeros)):
        chosen = scales if group else scales[:, :1]
        packed = ops["pack_linear"](codes, "int8", group, chosen, points, activations)
        expected = x.float() @ (codes.float() - (3 if group else 0)).T
        whole = ops["linear"](x, packed)
        torch.testing.assert_close(whole, expected.bfloat16(), rtol=2**-7, atol=0)
        for rows in (1, 2, 3, 4, 6, 7, 9, 16):
            assert torch.equal(ops["linear"](x[:rows], packed), whole[:rows])


@pytest.mark.parametrize(("name", "group"), [("int8", 0), ("int8", 64), ("int4", 64)])
def test_rows_of_two_tiles_of_activations(ops, name, group):
    """Tiles of a product begin at any row, those of activations at every sixth."""
    codes = torch.randint(0, 16, (80, 320), dtype=torch.uint8 if name == "int4" else torch.int8)
    scales = torch.rand(80, 320 // group if group else 1)
    zeros = torch.randint(0, 16, scales.shape).float() if group else None
    packed = ops["pack_linear"](codes, name, group, scales, zeros, "int8")
    x = torch.randn(32, 320).bfloat16()
    whole = ops["linear"](x, packed)
    for rows in range(1, 32):
        assert torch.equal(ops["linear"](x[:rows], packed), whole[:rows])


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_blocks_in_registers_and_in_a_buffer(ops, name, activations):
    """Which of them depends on the processor, on rows and on the width of a panel."""
    packed = ops["pack_blocks"](stored_blocks(name, 80, 512)[0], name, activations)
    x = torch.randn(32, 512).bfloat16()
    whole = ops["linear"](x, packed)
    for rows in range(1, 32):
        assert torch.equal(ops["linear"](x[:rows], packed), whole[:rows])


@pytest.mark.parametrize("group", [0, 64])
def test_fp8_in_registers_and_in_a_buffer(ops, group):
    """On some processors 66 rows are the most whose codes are decoded in registers."""
    codes = torch.randn(80, 320).to(torch.float8_e4m3fn)
    scales = torch.rand(80, 320 // group if group else 1)
    packed = ops["pack_linear"](codes, "fp8", group, scales)
    x = torch.randn(80, 320).bfloat16()
    whole = ops["linear"](x, packed)
    for rows in range(1, 80):
        assert torch.equal(ops["linear"](x[:rows], packed), whole[:rows])


def test_a_row_is_the_same_whatever_is_fetched_meanwhile(ops):
    """Up to 128 rows of bf16 meet shorter chunks of k than more rows do."""
    packed = ops["pack_linear"](torch.randn(80, 2100).bfloat16())
    x = torch.randn(150, 2100).bfloat16()
    whole = ops["linear"](x, packed)
    for rows in (6, 7, 8, 13, 64, 128, 129):
        assert torch.equal(ops["linear"](x[:rows], packed), whole[:rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_outputs_larger_than_a_cache(ops, name, dtype):
    """Whole lines are written past the caches, the last ones of a narrow panel are not."""
    outputs, rows = 6240, 700
    codes, scales = codes_of("int8", outputs, 64), torch.rand(outputs, 1)
    packed = (
        ops["pack_linear"](codes, name, scales=scales, activations="int8")
        if name == "int8"
        else ops["pack_linear"](codes.bfloat16())
    )
    x, out = torch.randn(rows, 64).to(dtype), torch.empty(rows, outputs, dtype=dtype)
    ops["linear"](x, packed, None, out)
    pieces = [ops["linear"](piece, packed) for piece in x.split(300)]
    assert torch.equal(out, torch.cat(pieces))


@pytest.mark.parametrize("outputs", [16, 64, 192, 208])
def test_one_row_loses_what_many_rows_lose(ops, outputs):
    """Products around the smallest normal number, where instructions differ in what they flush."""
    weight = torch.randn(outputs, 320).mul(1e-19).bfloat16()
    x = torch.randn(20, 320).mul(1e-19).bfloat16()
    packed = ops["pack_linear"](weight)
    whole = ops["linear"](x, packed)
    assert whole.count_nonzero() > 0
    for row in range(3):
        assert torch.equal(ops["linear"](x[row : row + 1], packed), whole[row : row + 1])


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_not_hidden(ops, activations, value):
    scales = torch.rand(40, 1)
    packed = ops["pack_linear"](codes_of("int8", 40, 300), "int8", 0, scales, None, activations)
    x = torch.randn(3, 300)
    x[1, 299] = value
    assert ops["linear"](x, packed).isnan().any(1).tolist() == [False, True, False]
    assert ops["linear"](torch.zeros(2, 300), packed).eq(0).all()


def test_logits_in_fp32_and_higher_rank(ops):
    weight, x = torch.randn(50, 64).bfloat16(), torch.randn(2, 3, 64).bfloat16()
    packed = ops["pack_linear"](weight)
    out = poisoned(2, 3, 50, dtype=torch.float32)
    ops["linear"](x, packed, out=out)
    assert_close(out, (x.double() @ weight.double().T).float(), factor=4)


def test_columns_lying_apart(ops):
    weight, x = torch.randn(20, 32), torch.randn(32, 5)
    out = ops["linear"](x.T, ops["pack_linear"](weight))
    torch.testing.assert_close(out, x.T @ weight.T)


def test_weights_that_are_not_packed_go_to_torch(ops):
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
    with pytest.raises(ValueError, match="^activations must be one of int8, bf16"):
        ops["pack_linear"](torch.randn(8, 32), activations="int3")
    with pytest.raises(ValueError, match="^zeros must be None for fp32"):
        ops["pack_linear"](torch.randn(8, 32), zeros=torch.ones(8, 1))
    with pytest.raises(ValueError, match="^scales must be"):
        ops["pack_linear"](torch.zeros(8, 32, dtype=torch.int8), "int8", scales=torch.ones(7))
