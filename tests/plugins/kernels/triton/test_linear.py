"""Linear layers on codes, against the weight that the codes stand for."""

from __future__ import annotations

import pytest
import torch
from tests.plugins.kernels.triton.close import DTYPES, assert_close, each_dtype

from modulm_quantized.codes import Codes
from modulm_quantized.words import E2M1

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def codes_of(form, outputs, inputs, group, *, zeros=False, exponents=False):
    """Random codes as kernels take them, and what they stand for."""
    groups = inputs // group if group else 1
    scales = torch.rand(outputs, groups) * 0.1 + 0.01
    if exponents:
        scales = torch.randint(120, 126, (outputs, groups), dtype=torch.uint8)
    stored = torch.exp2(scales.float() - 127) if exponents else scales
    points, levels = None, None
    if form == "fp8":
        values = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
        values[0, :2] = torch.tensor([448.0, -(2.0**-9)])
    elif form == "int8":
        values = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
        points = torch.randint(-9, 9, (outputs, groups)).float() + 0.5 if zeros else None
    else:
        values = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
        levels = {"e2m1": 2 * E2M1, "iq4": torch.tensor(IQ4).float()}.get(form)
        if form == "int4":
            points = torch.randint(0, 16, (outputs, groups)).float() if zeros else None
            centred = torch.full((outputs, groups), 8.0) if points is None else points
            return values, scales, points, Codes(values, stored, centred).weight(torch.float32)
    return values, scales, points, Codes(values, stored, points, None, levels).weight(torch.float32)


CASES = [
    ("int4", 128, True, False), ("int4", 32, False, False), ("int4", 0, True, False),
    ("int4", 64, False, True), ("int8", 0, False, False), ("int8", 128, True, False),
    ("int8", 16, True, False), ("fp8", 0, False, False), ("fp8", 128, False, False),
    ("fp8", 32, False, True), ("e2m1", 32, False, True), ("e2m1", 16, False, False),
    ("iq4", 32, False, False),
]  # fmt: skip


@each_dtype
@pytest.mark.parametrize(("form", "group", "zeros", "exponents"), CASES)
def test_it_is_a_product_with_what_the_codes_stand_for(
    ops, device, dtype, form, group, zeros, exponents
):
    inputs = 256 if group else 75
    values, scales, points, weight = codes_of(
        form, 70, inputs, group, zeros=zeros, exponents=exponents
    )
    packed = ops["pack_quantized"](
        values.to(device), form, group, scales.to(device),
        None if points is None else points.to(device),
    )  # fmt: skip
    assert packed.rounded == ""
    x = torch.randn(3, inputs + 5).to(device, dtype)[:, :inputs]
    bias = torch.randn(70).to(device, dtype)
    actual = ops["linear"](x, packed, bias)
    wanted = (x.float() @ weight.to(device).T + bias.float()).to(dtype)
    assert_close(actual / weight.abs().max(), wanted / weight.abs().max(), 8)
    out = torch.full((3, 90), torch.nan, dtype=dtype, device=device)
    ops["linear"](x, packed, None, out[:, 10:80])
    assert_close(out[:, 10:80] + bias, actual, 4)
    assert out[:, 80:].isnan().all()
    torch.testing.assert_close(
        ops["unpack_linear"](packed).float().cpu(), weight, rtol=8e-3, atol=1e-6
    )


@pytest.mark.parametrize(
    ("form", "group", "activations", "wide"),
    [
        ("int8", 0, "int8", 256), ("int8", 128, "int8", 256), ("int4", 32, "int8", 256),
        ("fp8", 0, "fp8", 128), ("fp8", 128, "fp8", 128),
    ],
)  # fmt: skip
@pytest.mark.parametrize("zeros", [False, True])
def test_rounded_activations(ops, device, form, group, activations, wide, zeros):
    """Only what rounding itself loses, with a scale for each row and so many inputs."""
    if zeros and form == "fp8":
        pytest.skip("floats have no zero points")
    values, scales, points, weight = codes_of(form, 40, 512, group, zeros=zeros)
    packed = ops["pack_quantized"](
        values.to(device), form, group, scales.to(device),
        None if points is None else points.to(device), activations,
    )  # fmt: skip
    assert packed.rounded == activations
    x = torch.randn(5, 512).half()
    x[:, :wide] *= 50  # the rest has scales of its own
    grouped = x.float().unflatten(1, (-1, wide))
    largest = 127.0 if activations == "int8" else 448.0
    step = grouped.abs().amax(-1, keepdim=True) / largest
    rounded = grouped / step
    rounded = rounded.round() if activations == "int8" else rounded.to(torch.float8_e4m3fn).float()
    wanted = (rounded * step).flatten(1) @ weight.T
    actual = ops["linear"](x.to(device), packed).float().cpu()
    bound = 2e-3 * wanted.abs().max()
    torch.testing.assert_close(actual, wanted, rtol=2e-3, atol=float(bound))


def test_neither_the_rows_beside_nor_their_number_change_a_bit(ops, device):
    """Long sums in spans: side by side for few rows, one after the other for many.

    Sums of whole numbers are exact, so that bits only depend on the order of what is scaled.
    """
    values, scales, points, _ = codes_of("int4", 40, 4096, 128, zeros=True)
    packed = ops["pack_quantized"](
        values.to(device), "int4", 128, scales.to(device), points.to(device)
    )
    x = torch.randint(-8, 9, (33, 4096)).float().to(device)
    whole = ops["linear"](x, packed)
    assert torch.equal(ops["linear"](x[7:9], packed), whole[7:9])
    torch.testing.assert_close(whole.cpu(), x.cpu() @ packed.weight().float().cpu().T,
                               rtol=1e-2, atol=2)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_floats_are_left_to_torch(ops, device, dtype):
    weight, x = torch.randn(6, 5).to(device, dtype), torch.randn(2, 5).to(device, dtype)
    packed = ops["pack_linear"](weight)
    assert packed is weight
    assert ops["unpack_linear"](packed) is weight
    assert torch.equal(ops["linear"](x, packed), torch.nn.functional.linear(x, weight))


def test_what_does_not_fit_is_refused(ops):
    pack, codes = ops["pack_quantized"], torch.zeros(4, 64, dtype=torch.uint8)
    scales = torch.ones(4, 2)
    with pytest.raises(ValueError, match="group 48|must be one of"):
        pack(codes, "int4", 48, scales)
    with pytest.raises(ValueError, match=r"scales must be \[4, 1\], not \[4, 2\]"):
        pack(codes, "int4", 64, scales)
    with pytest.raises(ValueError, match="weight must be torch.int8 for int8"):
        pack(codes, "int8", 32, scales)
    with pytest.raises(ValueError, match="zeros must be None for e2m1"):
        pack(codes, "e2m1", 32, scales, scales)
    with pytest.raises(ValueError, match="format must be one of"):
        pack(codes, "int3", 32, scales)
    packed = pack(codes, "int4", 32, scales)
    with pytest.raises(ValueError, match=r"x must be \[T, 64\]"):
        ops["linear"](torch.zeros(1, 63), packed)
