"""Products in low precision against exact ones of what is stored, with bounds from the formats."""

from __future__ import annotations

import torch
from samples import parametrize_sample

from modulm.ops import twins
from modulm_quantized import (
    ACTIVATION_FORMATS,
    SCHEMES,
    exact_product,
    round_activations,
    round_weight,
    rounding_bound,
)
from modulm_quantized.fitting import for_kernels
from modulm_quantized.norms import rms_norm_rounded
from modulm_quantized.words import E2M1

#: Formats of inputs, and schemes of weights that they are multiplied with.
CASES = [
    ("int8", "int8"), ("fp8", "fp8_per_block"), ("fp8_token", "fp8_per_channel"),
    ("fp8_static", "fp8_per_tensor"), ("mxfp8", "mxfp8"), ("mxfp8", "mxfp4"),
    ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"),
]  # fmt: skip


def inputs(tokens, size):
    """Rows with outliers, a row of zeros, and numbers that lie between two of a format."""
    x = torch.randn(tokens, size)
    x[:, ::37] *= 40
    x[0] = 0
    x[1, :32] = torch.arange(32) / 4 - 4
    return x.half()


def unit(x):
    """A static scale: the largest input becomes the largest number."""
    return (x.float().abs().max() / 448).reshape(())


@parametrize_sample("name", ACTIVATION_FORMATS, every=3)
def test_inputs_are_rounded_as_the_reference_does(ops, device, name):
    from modulm_kernels_triton.round_rows import round_rows

    x = inputs(4, 544)
    scale = unit(x) if name == "fp8_static" else None
    wanted = round_activations(x, name, scale)
    size = 544
    got = round_rows(x.to(device), name, None if scale is None else scale.to(device))
    codes = got.codes.cpu()
    values = wanted.values[:, :size]
    if ACTIVATION_FORMATS[name].numbers == "e2m1":
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    if ACTIVATION_FORMATS[name].numbers == "e4m3":  # zeros may have either sign
        codes, values = codes.view(torch.float8_e4m3fn).float(), values.float()
    assert torch.equal(codes, values)
    scales = got.scales.cpu()
    if name.startswith("mx"):
        scales = torch.exp2(scales.float() - 127)
    if got.factors is not None:
        scales = scales.view(torch.float8_e4m3fn).float() * got.factors.cpu()[:, None]
    assert torch.equal(scales.expand_as(wanted.scales), wanted.scales)
    moved = (wanted.weight(torch.float32)[:, :size] - x.float()).abs()
    assert (moved <= rounding_bound(x, name, scale)).all()


def stored_numbers(rows, name, size):
    """What a kernel's codes and scales stand for: [T, size] fp32."""
    form = ACTIVATION_FORMATS[name]
    codes, scales = rows.codes.cpu(), rows.scales.cpu()
    if form.numbers == "e2m1":
        codes = E2M1[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]
    elif form.numbers == "e4m3":
        codes = codes.view(torch.float8_e4m3fn)
    if form.scales == "power":
        scales = torch.exp2(scales.float() - 127)
    elif form.scales == "e4m3":
        scales = scales.view(torch.float8_e4m3fn).float() * rows.factors.cpu()[:, None]
    scales = scales if scales.dim() == 2 else scales.expand(len(codes), 1)
    return codes.float() * scales.repeat_interleave(form.group or size, 1)[:, :size]


@parametrize_sample(
    ("name", "size"),
    [
        (name, size)
        for name, form in ACTIVATION_FORMATS.items()
        for size in (544, 130)
        if size == 544 or form.scales == "float"
    ],
    every=2,
)
def test_norms_round_as_norm_and_rounding_do(ops, device, name, size):
    """Bit by bit what the two kernels give one after the other, and what the twin gives."""
    from modulm_kernels_triton.round_rows import round_rows

    x, before = inputs(4, size), torch.randn(4, size).half()
    weight, scale = torch.rand(size) + 0.5, None
    if name == "fp8_static":
        scale = torch.tensor(0.02)
    for residual in (None, before):
        ours, theirs, twin = (
            None if residual is None else residual.clone().to(device) for _ in range(3)
        )
        on_device = None if scale is None else scale.to(device)
        arguments = (weight.to(device), 1e-6, name, on_device, 1.0)
        got = ops["rms_norm_rounded"](x.to(device), ours, *arguments)
        if residual is None:
            normed = ops["rms_norm"](x.to(device), arguments[0], 1e-6, offset=1.0)
        else:
            normed = ops["add_rms_norm"](x.to(device), theirs, arguments[0], 1e-6, offset=1.0)
            assert torch.equal(ours, theirs)
        form, given, rows = got.rounded
        wanted = round_rows(normed, name, on_device)
        assert (form, given) == (name, on_device)
        assert torch.equal(got, normed)
        assert torch.equal(rows.codes.view(torch.int8), wanted.codes.view(torch.int8))
        assert torch.equal(rows.scales, wanted.scales)
        if wanted.factors is not None:
            assert torch.equal(rows.factors, wanted.factors)
        plain = rms_norm_rounded(x.to(device), twin, *arguments)
        torch.testing.assert_close(got, plain, rtol=2**-10, atol=1e-4)
        # A number beside the middle of two codes may become the other one.
        step = rounding_bound(plain.cpu(), name, scale) * 2 + plain.cpu().abs() * 2**-9
        stored = plain.rounded[2].weight(torch.float32)[:, :size].cpu()
        wide = stored_numbers(rows, name, size)
        # A largest number beside a power of two may double or halve its group's scale.
        if ACTIVATION_FORMATS[name].scales != "float":
            step = step * 2
        assert ((wide - stored).abs() <= step + 1e-6).all()


@parametrize_sample(("name", "scheme"), CASES, every=4)
def test_products_are_those_of_what_is_stored(ops, device, name, scheme):
    x, weight = inputs(5, 512), torch.randn(70, 512) / 16
    codes = round_weight(weight, SCHEMES[scheme])
    fit = for_kernels(codes)
    scale = unit(x) if name == "fp8_static" else None
    more = {} if scale is None else {"input_scale": scale.to(device)}
    packed = ops["pack_quantized"](
        fit.values.to(device), fit.form, fit.group, fit.scales.to(device),
        None if fit.zeros is None else fit.zeros.to(device), name, **more,
    )  # fmt: skip
    assert packed.rounded == name
    rounded = round_activations(x, name, scale)
    exact = exact_product(rounded, codes, 512)
    wide = codes.weight(torch.float32)
    size = rounded.weight(torch.float32)[:, :512].abs() @ wide.abs().T
    out = torch.empty(5, 70, dtype=torch.float32, device=device)
    got = ops["linear"](x.to(device), packed, None, out).cpu()
    # 512 additions in fp32, each of a product that is rounded with its scale.
    assert ((got - exact).abs() <= 514 * 2.0**-23 * size + 1e-6).all()
    moved = rounding_bound(x, name, scale) @ wide.abs().T
    assert ((exact - x.double() @ wide.double().T).abs() <= moved.double() * (1 + 2e-6)).all()
    # The weight is as stored: bf16 has eight bits of it.
    stored = ops["unpack_linear"](packed).float().cpu()
    torch.testing.assert_close(stored, wide, rtol=2**-8, atol=1e-7)
    assert torch.equal(ops["linear"](x[2:3].to(device), packed, None, out[:1]).cpu(), got[2:3])


@parametrize_sample(("name", "scheme"), [CASES[7], CASES[2], CASES[6]], every=3)
def test_experts(ops, device, name, scheme):
    experts, hidden, inner = 3, 64, 64
    gate_up = torch.randn(experts, 2 * inner, hidden) / 8
    down = torch.randn(experts, hidden, inner) / 8
    stacks, weights = [], []
    for stack, parts in ((gate_up, 2), (down, 1)):
        coded = [round_weight(one, SCHEMES[scheme]) for one in stack]
        fits = [for_kernels(codes) for codes in coded]
        packed = ops["pack_quantized_experts"](
            ((f.values.to(device), f.scales.to(device), None) for f in fits),
            experts, fits[0].form, fits[0].group, parts, name,
        )  # fmt: skip
        assert packed.codes.rounded == name
        stacks.append(packed)
        weights.append(torch.stack([codes.weight(torch.float32) for codes in coded]))
    x, ids = torch.randn(4, hidden).half(), torch.tensor([[0, 2], [2, 1], [1, 0], [0, 1]])
    shares = torch.rand(4, 2)
    got = ops["fused_experts"](x.to(device), shares.to(device), ids.to(device), *stacks)
    wanted = torch.zeros(4, hidden)
    for token, (row, share) in enumerate(zip(ids, shares, strict=True)):
        for expert, factor in zip(row.tolist(), share, strict=True):
            seen = round_activations(x[token : token + 1], name).weight(torch.float32)[:, :hidden]
            gate, up = (seen @ weights[0][expert].T).chunk(2, 1)
            between = (torch.nn.functional.silu(gate) * up).half()
            back = round_activations(between, name).weight(torch.float32)[:, :inner]
            wanted[token] += factor * (back @ weights[1][expert].T)[0]
    # A number between that lies near the middle of two codes may become the other one: a step of
    # two to the power of -2 (e2m1) or -4 (e4m3) of it, seldom.
    torch.testing.assert_close(got.float().cpu(), wanted, rtol=2e-2, atol=2e-2)
    plain = twins.fused_experts(x.float(), shares, ids, *weights)
    assert (got.float().cpu() - plain).abs().max() < 0.5 * plain.abs().max()


def test_scales_that_are_no_nvfp4_are_multiplied_in_16_bits(ops, device):
    codes = torch.randint(0, 16, (16, 64), dtype=torch.uint8, device=device)
    scales = torch.rand(16, 4, device=device) + 0.1
    assert ops["pack_quantized"](codes, "e2m1", 16, scales, None, "nvfp4").rounded == ""
    assert ops["pack_quantized"](codes, "e2m1", 16, scales, None, "mxfp4").rounded == ""
