"""Linear layers: floats with torch, codes with a kernel.

Sums over K are computed per span and then over spans, in an order that only depends on the weight's
shape. With few rows, spans are computed in parallel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from modulm_kernels_triton.device import low_precision
from modulm_kernels_triton.launch import cut, launch, power_of_two
from modulm_kernels_triton.product import product
from modulm_kernels_triton.round_rows import round_rows
from modulm_kernels_triton.tuning import tuned
from modulm_kernels_triton.weights import PackedCodes, lay, need

__all__ = ["OPS"]

#: Programs that keep a large GPU busy, and the fewest blocks of K per program.
_PROGRAMS, _LEAST_BLOCKS, _MOST_SPANS = 512, 4, 16
#: Maximum rows for which spans are computed in parallel.
_FEW_ROWS = 32
_COLUMNS = 64


@triton.jit(do_not_specialize=["M", "each", "spans"])
def _linear(
    x, x_row, x_scales, x_groups, weight, scales, zeros, table, bias, out, out_row,
    M, N, K, size, groups, each, spans,
    MANY: tl.constexpr, APART: tl.constexpr, BIAS: tl.constexpr,
    FORM: tl.constexpr, ROUNDED: tl.constexpr, GROUP: tl.constexpr, EXPONENTS: tl.constexpr,
    ZEROS: tl.constexpr, SCALED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BM)
    tile = tl.program_id(0)
    row = (tile % tiles * BM + tl.arange(0, BM)).to(tl.int64)
    column = (tile // tiles * BN + tl.arange(0, BN)).to(tl.int64)
    row_inside, column_inside = row < M, column < N
    part, span = tl.program_id(1), each * BK
    total = product(
        x, row, x_row, x_scales, x_groups, row_inside,
        weight, scales, zeros, table, column, column_inside,
        part * span, tl.minimum(part * span + span, K), K, size, groups,
        FORM, ROUNDED, GROUP, EXPONENTS, ZEROS, SCALED, BM, BN, BK,
    )  # fmt: skip
    if not APART:
        if MANY:
            for i in range(1, spans):
                total += product(
                    x, row, x_row, x_scales, x_groups, row_inside,
                    weight, scales, zeros, table, column, column_inside,
                    i * span, tl.minimum(i * span + span, K), K, size, groups,
                    FORM, ROUNDED, GROUP, EXPONENTS, ZEROS, SCALED, BM, BN, BK,
                )  # fmt: skip
        if BIAS:
            total += tl.load(bias + column, column_inside, other=0.0).to(tl.float32)[None, :]
    target = out + part.to(tl.int64) * M * N + row[:, None] * out_row + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), row_inside[:, None] & column_inside[None, :])


@triton.jit(do_not_specialize=["M", "spans"])
def _add_spans(
    parts, bias, out, out_row, M, N, spans, BIAS: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = column < N
    source = parts + row * N + column
    step = (tl.program_id(0) * 0 + M).to(tl.int64) * N
    total = tl.load(source, inside, other=0.0)
    for _ in range(1, spans):
        source += step
        total += tl.load(source, inside, other=0.0)
    if BIAS:
        total += tl.load(bias + column, inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + column, total.to(out.dtype.element_ty), inside)


def pack_linear(
    weight: Tensor,
    format: str | None = None,  # noqa: A002  the word that the flags use
    group: int = 0,
    scales: Tensor | None = None,
    zeros: Tensor | None = None,
    activations: str = "bf16",
    input_scale: Tensor | None = None,
) -> Any:
    """The op `pack_linear`, which leaves floats unchanged; and `pack_quantized`, for codes.

    weight: [N, K]: int8, float8_e4m3fn, or for "int4", "e2m1" and "iq4" uint8 in 0..15. scales,
    zeros: [N, K / group]; a weight is scale * (code - zero); uint8 scales are exponents of two plus
    127. zeros default to 0, for int4 to 8. group: 0 means all of K. activations: the format that
    inputs are quantized to in a product, "bf16" for none. input_scale: of all inputs, one number
    fp32, for "fp8_static".
    """
    if format is None:
        need(weight.is_floating_point(), f"weight must hold floats, not {weight.dtype}")
        return weight
    return lay(weight, format, group, scales, zeros, activations, input_scale)


def unpack_linear(packed: PackedCodes | Tensor) -> Tensor:
    """Return the weight [N, K] in its float dtype, or dequantized to bf16."""
    return packed.weight() if isinstance(packed, PackedCodes) else packed


def linear(
    x: Tensor, packed: PackedCodes | Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """The op `linear`; x: [..., K] -> [..., N] in x's dtype, or in that of `out`."""
    if not isinstance(packed, PackedCodes):
        result = F.linear(x, packed, bias)
        return result if out is None else out.copy_(result)
    need(x.shape[-1] == packed.inputs, f"x must be [T, {packed.inputs}], not {list(x.shape)}")
    if out is None:
        out = torch.empty(*x.shape[:-1], packed.outputs, dtype=x.dtype, device=x.device)
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, packed.inputs).contiguous()
    target = out if out.dim() == 2 else out.view(-1, packed.outputs)
    count, block = rows.shape[0], packed.block
    each, spans = _spans(packed.outputs, packed.inputs, block)
    inputs = round_rows(rows, packed.rounded, packed.input_scale)
    apart = spans > 1 and count <= _FEW_ROWS
    into, into_row = target, target.stride(0)
    if apart:
        into = torch.empty(spans, count, packed.outputs, dtype=torch.float32, device=x.device)
        into_row = packed.outputs
    tiles = tuned("linear", M=min(power_of_two(count), 256), BYTES=x.element_size())
    blocks = {name: size for name, size in tiles.items() if name in ("BM", "BN")}
    launch(
        _linear,
        (cut(count, blocks["BM"]) * cut(packed.outputs, blocks["BN"]), spans if apart else 1),
        inputs.codes, inputs.codes.stride(0), inputs.scales, inputs.stride, *packed.tensors(inputs),
        rows if bias is None else bias, into, into_row,
        count, packed.outputs, packed.inputs, packed.data.shape[1], packed.groups, each, spans,
        MANY=spans > 1, APART=apart, BIAS=bias is not None and not apart,
        **packed.meta(tiles["BM"]), **tiles,
    )  # fmt: skip
    if apart:
        launch(
            _add_spans, (count, cut(packed.outputs, 256)),
            into, rows if bias is None else bias, target, target.stride(0), count, packed.outputs,
            spans, BIAS=bias is not None, BN=256,
        )  # fmt: skip
    return out


def _spans(outputs: int, inputs: int, block: int) -> tuple[int, int]:
    """Return (blocks of inputs per span, number of spans)."""
    blocks = cut(inputs, block)
    wanted = min(_PROGRAMS // max(cut(outputs, _COLUMNS), 1), blocks // _LEAST_BLOCKS, _MOST_SPANS)
    each = cut(blocks, max(wanted, 1))
    return each, cut(blocks, each)


OPS: dict[str, Callable[..., Any]] = {
    "linear": linear,
    "pack_linear": pack_linear,
    "pack_quantized": pack_linear,
    "unpack_linear": unpack_linear,
    "low_precision": low_precision,
}
