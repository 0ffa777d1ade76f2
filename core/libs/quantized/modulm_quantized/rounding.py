"""Quantize plain weights, by named schemes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from attrs import frozen
from torch import Tensor

from modulm_quantized.codes import Codes
from modulm_quantized.words import E2M1

__all__ = ["SCHEMES", "Scheme", "round_weight"]

#: Numbers processed at a time, so that they and the results fit into one core's cache.
_BLOCK = 49_152
_TINY = 1e-12
#: Group sizes that the op `round_groups` supports.
_KERNEL_GROUPS = (32, 64, 128, 256)
_FP8 = torch.float8_e4m3fn
#: The largest code of each value type.
_LARGEST = {"int8": 127.0, "fp8": torch.finfo(_FP8).max, "e2m1": 6.0}
#: Midpoints between adjacent magnitudes of e2m1.
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
#: Fractions of a group's range that are tried.
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)


@frozen
class Scheme:
    """How a weight is quantized.

    `values` are "int8", "int4" (0..15, with a zero point), "fp8" (e4m3) or "e2m1" (4-bit floats).
    `rows` x `columns` values share a scale; 0 means all. Scales are floats, powers of two with
    `exponents`, or with `nested` e4m3 times one number for the whole weight.
    """

    values: str
    rows: int = 1
    columns: int = 0
    exponents: bool = False
    nested: bool = False

    def __str__(self) -> str:
        if self.rows == self.columns == 0:
            scope = "weight"
        elif self.rows > 1:
            scope = f"{self.rows} x {self.columns}"
        else:
            scope = f"{self.columns} inputs" if self.columns else "output"
        kind = "an exponent" if self.exponents else "a scale"
        kind += " and a zero point" if self.values == "int4" else ""
        return f"{self.values}, {kind} per {scope}"

    def unfit(self, inputs: int) -> str | None:
        """Return why a weight with `inputs` inputs cannot be quantized, None if it can."""
        if self.rows == 1 and self.columns and inputs % self.columns:
            return f"{inputs} inputs are not whole groups of {self.columns}"
        return None


#: Names for `--quantization` and commands.
SCHEMES: Mapping[str, Scheme] = {
    "int8": Scheme("int8"),
    "int4": Scheme("int4", columns=64),
    "fp8": Scheme("fp8"),
    "fp8_per_tensor": Scheme("fp8", rows=0),
    "fp8_per_block": Scheme("fp8", rows=128, columns=128),
    "fp8_per_channel": Scheme("fp8"),
    "int8_per_channel_weight_only": Scheme("int8"),
    "mxfp8": Scheme("fp8", columns=32, exponents=True),
    "mxfp4": Scheme("e2m1", columns=32, exponents=True),
    "nvfp4": Scheme("e2m1", columns=16, nested=True),
}

_DTYPES = {"int8": torch.int8, "int4": torch.uint8, "fp8": _FP8, "e2m1": torch.uint8}


def round_weight(
    weight: Tensor,
    scheme: Scheme,
    parts: tuple[int, ...] = (),
    round_groups: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None,
) -> Codes:
    """Quantize weight: [N, K] of any float dtype.

    parts: sizes of fused parts along N, which have scales of their own. round_groups: the kernels'
    op of that name, equivalent for 4-bit integers. Runs independent pieces on as many cores as
    torch has threads.
    """
    if round_groups is not None and scheme.values == "int4" and scheme.columns in _KERNEL_GROUPS:
        values, scales, zeros = round_groups(weight, scheme.columns)
        return Codes(values, scales.bfloat16(), zeros)
    if scheme.rows == 1 and not scheme.nested:
        return _round_rows(weight, scheme)
    pieces = torch.split(weight, list(parts or weight.shape[:1]))
    blocks = [_round_blocks(piece, scheme) for piece in pieces]
    if len(blocks) == 1:
        return blocks[0]
    values = torch.cat([codes.values for codes in blocks])
    scales = torch.cat([codes.scales for codes in blocks])
    return Codes(values, scales, levels=blocks[0].levels)


def _round_rows(weight: Tensor, scheme: Scheme) -> Codes:
    outputs, inputs = weight.shape
    groups = inputs // scheme.columns if scheme.columns else 1
    device, integers = weight.device, scheme.values == "int4"
    values = torch.empty(outputs, inputs, dtype=_DTYPES[scheme.values], device=device)
    scales = torch.empty(outputs, groups, device=device)
    zeros = torch.empty(outputs, groups, device=device) if integers else None

    def some(rows: slice) -> None:
        wide = torch.unflatten(weight[rows].float(), 1, (groups, -1))
        if zeros is not None:
            codes, scales[rows], zeros[rows] = _round_groups(wide)
        else:
            largest = torch.maximum(wide.amax(-1), wide.amin(-1).neg_())
            scales[rows] = _scales(largest, scheme)
            codes = _coded(wide / scales[rows][..., None], scheme.values)
        values[rows] = codes.flatten(1).to(values.dtype)

    _in_parallel(outputs, max(1, _BLOCK // inputs), some)
    stored_scales = scales if zeros is None else scales.bfloat16()
    return Codes(values, stored_scales, zeros, levels=_levels(scheme, device))


def _round_blocks(weight: Tensor, scheme: Scheme) -> Codes:
    """Quantize with scales that adjacent rows share, or that are themselves scaled per weight."""
    outputs, inputs = weight.shape
    rows, columns = scheme.rows or outputs, scheme.columns or inputs
    size = math.gcd(columns, inputs)
    largest = torch.empty(outputs, inputs // size, device=weight.device)

    def look(some: slice) -> None:
        wide = torch.unflatten(weight[some].float(), 1, (-1, size))
        largest[some] = wide.abs().amax(-1)

    step = max(1, _BLOCK // inputs)
    _in_parallel(outputs, step, look)
    grid = _grid(largest, rows, columns // size)
    scales = _scales(grid, scheme)
    values = torch.empty(outputs, inputs, dtype=_DTYPES[scheme.values], device=weight.device)

    def put(some: slice) -> None:
        wide = torch.unflatten(weight[some].float(), 1, (-1, size)) / scales[some][..., None]
        values[some] = _coded(wide, scheme.values).flatten(1).to(values.dtype)

    _in_parallel(outputs, step, put)
    return Codes(values, scales, levels=_levels(scheme, weight.device))


def _levels(scheme: Scheme, device: torch.device) -> Tensor | None:
    return E2M1.to(device) if scheme.values == "e2m1" else None


def _grid(largest: Tensor, rows: int, columns: int) -> Tensor:
    """Return the maximum of each block of `rows` x `columns` entries, at every entry."""
    outputs, groups = largest.shape
    tall, wide = -(-outputs // rows), -(-groups // columns)
    padded = largest.new_zeros(tall * rows, wide * columns)
    padded[:outputs, :groups] = largest
    blocks = padded.view(tall, rows, wide, columns).amax((1, 3))
    spread = blocks.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return spread[:outputs, :groups].contiguous()


def _scales(largest: Tensor, scheme: Scheme) -> Tensor:
    """Return the scales for `largest`, the maximum magnitude of the values that share one."""
    top = _LARGEST[scheme.values]
    if scheme.exponents:
        # The power of two that keeps the values in range (OCP Microscaling Formats, section 6.3).
        exponents = largest.clamp(min=2.0**-120).log2().floor_() - math.floor(math.log2(top))
        return torch.exp2(exponents)
    if scheme.nested:
        whole = (largest.amax() / (top * _LARGEST["fp8"])).clamp(min=_TINY)
        return (largest / (top * whole)).clamp(min=2.0**-9).to(_FP8).float() * whole
    return (largest / top).clamp_(min=_TINY)


def _coded(wide: Tensor, values: str) -> Tensor:
    """Round numbers, already divided by their scale, to representable values."""
    top = _LARGEST[values]
    if values == "int8":
        return wide.clamp_(-top, top).round_()
    if values == "fp8":
        return wide.clamp_(-top, top).to(_FP8)
    middles = torch.tensor(_MIDDLES, device=wide.device)
    return (
        torch.bucketize(wide.abs(), middles).to(torch.uint8) | wide.signbit().to(torch.uint8) << 3
    )


def _round_groups(wide: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize wide: [n, groups, group] -> codes 0..15, scales, zeros.

    Tries several fractions of each group's range and keeps the one with the least squared error:
    clipping a rare outlier costs less than coarser steps for the rest of the group. Scales are bf16
    values, as in the kernels. Groups are transposed so that every operation is vectorized along
    them.
    """
    shape = wide.shape[:2]
    laid = wide.flatten(0, 1).T.contiguous()
    low, high = laid.amin(0).clamp_(max=0), laid.amax(0).clamp_(min=0)
    span = high - low
    best = torch.full_like(low, torch.inf)
    scales, zeros = torch.zeros_like(low), torch.zeros_like(low)
    exact, code = torch.empty_like(laid), torch.empty_like(laid)
    for shrink in _SHRINKS:
        scale = (span * (shrink / 15)).clamp_(min=_TINY).bfloat16().float()
        zero = (low * -shrink / scale).round_().clamp_(0, 15)
        torch.mul(laid, scale.reciprocal(), out=exact).add_(zero)
        torch.round(exact, out=code).clamp_(0, 15).sub_(exact)
        error = _folded(code.square_()).mul_(scale.square())
        better = error < best
        best = torch.where(better, error, best)
        scales, zeros = torch.where(better, scale, scales), torch.where(better, zero, zeros)
    torch.div(laid, scales, out=exact).add_(zeros).round_().clamp_(0, 15)
    return exact.T.contiguous().view(wide.shape), scales.view(shape), zeros.view(shape)


def _folded(errors: Tensor) -> Tensor:
    """Sum along the first dimension by halves, an order that kernels can reproduce."""
    while len(errors) > 1 and len(errors) % 2 == 0:
        first, second = errors.chunk(2)
        errors = first + second
    return errors.sum(0)


def _in_parallel(size: int, step: int, work: Callable[[slice], None]) -> None:
    """Call `work` on slices of `step` that cover 0..size, in threads."""
    pieces = [slice(start, min(start + step, size)) for start in range(0, size, step)]
    with _single_threaded() as threads, ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, pieces):
            pass


@contextmanager
def _single_threaded() -> Iterator[int]:
    """Limit operations to one torch thread; yields the previous number of threads.

    Threads that start within the block inherit the limit.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)
