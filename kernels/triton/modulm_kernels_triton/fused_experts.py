"""All experts of a layer: two grouped products and a sum, with tokens sorted by expert."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from modulm.ops import twins
from modulm_kernels_triton.by_expert import ByExpert, rows_of_blocks, sort_by_expert
from modulm_kernels_triton.launch import cut, launch, power_of_two
from modulm_kernels_triton.product import product
from modulm_kernels_triton.round_rows import round_rows
from modulm_kernels_triton.tuning import tuned
from modulm_kernels_triton.weights import PackedCodes, lay, need, stacked

__all__ = ["OPS", "ExpertCodes"]

_GATES = ("silu", "gelu", "gelu_tanh", "clamped_swiglu")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)

#: Codes, scales and zero points of one expert.
Coded = tuple[Tensor, Tensor, Tensor | None]


@frozen(eq=False)
class ExpertCodes:
    """A stack of weights [experts, N, K] as codes, with all experts' rows concatenated.

    `stack[e]` is the weight of expert e in bf16.
    """

    codes: PackedCodes
    experts: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """[experts, N, K]"""
        return self.experts, self.codes.outputs, self.codes.inputs

    @property
    def bytes(self) -> int:
        """Memory of all experts."""
        return self.codes.bytes

    def __getitem__(self, expert: int) -> Tensor:
        return self.codes.rows(expert * self.codes.outputs, self.codes.outputs).weight()

    def __len__(self) -> int:
        return self.experts


@triton.jit
def _gated(gate, up, ACT: tl.constexpr, alpha, limit):
    if ACT == "clamped_swiglu":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        result = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    elif ACT == "silu":
        result = gate / (1.0 + tl.exp(-gate)) * up
    elif ACT == "gelu":
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        result = gate / (1.0 + tl.exp(-2.0 * inner)) * up
    return result


@triton.jit
def _experts(
    x, x_row, x_scales, x_groups, weight, scales, zeros, table, bias, out, sorted_choices, blocks,
    top_k, N, K, size, groups, alpha, limit,
    GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    FORM: tl.constexpr, ROUNDED: tl.constexpr, GROUP: tl.constexpr, EXPONENTS: tl.constexpr,
    ZEROS: tl.constexpr, SCALED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Multiply a block of rows of one expert by BN of its N outputs; GATED: gate and up.

    x: rows by token if GATED, else by choice. out: [choices, N].
    """
    expert = tl.load(blocks + tl.program_id(1) * 3)
    if expert >= 0:
        first, count = (
            tl.load(blocks + tl.program_id(1) * 3 + 1),
            tl.load(blocks + tl.program_id(1) * 3 + 2),
        )
        at = tl.arange(0, BM)
        row_inside = at < count
        choice = tl.load(sorted_choices + first + at, row_inside, other=0).to(tl.int64)
        row = choice
        if GATED:
            row = choice // top_k
        column = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
        column_inside = column < N
        base = expert.to(tl.int64) * N
        if GATED:
            base *= 2
        total = product(
            x, row, x_row, x_scales, x_groups, row_inside,
            weight, scales, zeros, table, base + column, column_inside,
            0, K, K, size, groups,
            FORM, ROUNDED, GROUP, EXPONENTS, ZEROS, SCALED, BM, BN, BK,
        )  # fmt: skip
        if BIAS:
            total += tl.load(bias + base + column, column_inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up = product(
                x, row, x_row, x_scales, x_groups, row_inside,
                weight, scales, zeros, table, base + N + column, column_inside,
                0, K, K, size, groups,
                FORM, ROUNDED, GROUP, EXPONENTS, ZEROS, SCALED, BM, BN, BK,
            )  # fmt: skip
            if BIAS:
                more = tl.load(bias + base + N + column, column_inside, other=0.0)
                up += more.to(tl.float32)[None, :]
            total = _gated(total, up, ACT, alpha, limit)
        target = out + choice[:, None] * N + column[None, :]
        tl.store(
            target, total.to(out.dtype.element_ty), row_inside[:, None] & column_inside[None, :]
        )


@triton.jit
def _add_up(
    parts, weights, ids, out, out_row, size, top_k, BT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum a token's experts in the order of their index."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    at = tl.arange(0, BT)
    mine = tl.load(ids + row * top_k + at, at < top_k, other=9223372036854775807)
    share = tl.load(weights + row * top_k + at, at < top_k, other=0.0)
    earlier = (mine[:, None] > mine[None, :]) | (
        (mine[:, None] == mine[None, :]) & (at[:, None] > at[None, :])
    )
    rank = tl.sum(earlier.to(tl.int32), 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(top_k):
        choice = tl.sum(tl.where(rank == i, at, 0), 0)
        factor = tl.sum(tl.where(rank == i, share, 0.0), 0)
        part = tl.load(parts + (row * top_k + choice) * size + column, inside, other=0.0)
        total += part.to(tl.float32) * factor
    tl.store(out + row * out_row + column, total.to(out.dtype.element_ty), inside)


def pack_experts(weight: Tensor, parts: int = 1) -> Any:
    """The op `pack_experts`: stacks of floats are unchanged."""
    need(weight.dim() == 3, f"weight must be [experts, N, K], not {list(weight.shape)}")
    need(weight.dtype in _FLOATS, f"weight must hold floats, not {weight.dtype}")
    need(weight.shape[1] % parts == 0, f"weight of {weight.shape[1]} outputs has no {parts} parts")
    return weight


def pack_quantized_experts(
    stack: Iterable[Coded],
    experts: int,
    format: str,  # noqa: A002  the word that the flags use
    group: int = 0,
    parts: int = 1,
    activations: str = "bf16",
) -> ExpertCodes:
    """Pack codes for `fused_experts`.

    stack: for each of `experts` experts, codes [parts * N, K], scales and zero points [parts * N,
    groups] or None, as `pack_quantized` takes them, all in the same format.
    """
    packed = [
        lay(codes, format, group, scales, zeros, activations) for codes, scales, zeros in stack
    ]
    need(len(packed) == experts, f"expected {experts} experts, not {len(packed)}")
    if len({one.rounded for one in packed}) > 1:
        packed = [one.unrounded() for one in packed]
    first = packed[0]
    need(
        first.outputs % parts == 0,
        f"{first.outputs} outputs cannot be split into {parts} equal parts",
    )
    alike = all(
        one.data.shape == first.data.shape and one.scales.dtype == first.scales.dtype
        for one in packed
    )
    need(alike, "experts must have the same format")
    return ExpertCodes(stacked(packed), experts)


def fused_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Any,
    down: Any,
    *,
    act: str = "silu",
    alpha: float = 1.0,
    limit: float = 0.0,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See the twin, which handles stacks other than floats and codes of this provider."""
    if not all(isinstance(stack, Tensor | ExpertCodes) for stack in (gate_up, down)):
        result = twins.fused_experts(
            x, weights, ids, gate_up, down, act=act, alpha=alpha, limit=limit,
            gate_up_bias=gate_up_bias, down_bias=down_bias,
        )  # fmt: skip
        return result if out is None else out.copy_(result)
    need(act in _GATES, f"act must be one of {', '.join(_GATES)}, not {act!r}")
    (tokens, hidden), (experts, _, inner) = x.shape, down.shape
    fits = tuple(gate_up.shape) == (experts, 2 * inner, hidden) and down.shape[1] == hidden
    need(fits, f"stacks must be [E, 2 I, {hidden}] and [E, {hidden}, I]")
    ids, weights = ids.contiguous(), weights.contiguous()
    by_expert = sort_by_expert(ids, experts, rows_of_blocks(ids.numel(), experts))
    inner_rows = torch.empty(ids.numel(), inner, dtype=x.dtype, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    _product(x, gate_up, gate_up_bias, inner_rows, by_expert, ids.shape[1], act, alpha, limit)
    parts = torch.empty(ids.numel(), hidden, dtype=x.dtype, device=x.device)
    _product(inner_rows, down, down_bias, parts, by_expert)
    if out is None:
        out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    top_k = ids.shape[1]
    launch(
        _add_up, (tokens, cut(hidden, 1024)),
        parts, weights, ids, out, out.stride(0), hidden, top_k,
        BT=power_of_two(top_k), BLOCK=min(1024, power_of_two(hidden)),
    )  # fmt: skip
    return out


def _product(
    x: Tensor,
    stack: Tensor | ExpertCodes,
    bias: Tensor | None,
    out: Tensor,
    by_expert: ByExpert,
    top_k: int = 1,
    act: str = "",
    alpha: float = 1.0,
    limit: float = 0.0,
) -> None:
    """Multiply rows by their expert; with `act`, by gate and up, combined."""
    outputs, inputs = out.shape[1], x.shape[1]
    tiles = dict(tuned("fused_experts", BM=by_expert.rows, BYTES=x.element_size()))
    if isinstance(stack, Tensor):
        flat = stack.contiguous()
        tensors = (flat, flat, flat, flat)
        sizes, rows = (inputs, 0), round_rows(x, "")
        meta = {"FORM": "plain", "ROUNDED": "", "GROUP": 0, "EXPONENTS": False, "ZEROS": False,
                "SCALED": False, "BK": 64}  # fmt: skip
    else:
        codes = stack.codes
        rows = round_rows(x, codes.rounded)
        tensors = codes.tensors(rows)
        sizes = (codes.data.shape[1], codes.groups)
        meta = codes.meta(by_expert.rows)
    launch(
        _experts, (cut(outputs, tiles["BN"]), by_expert.blocks.shape[0]),
        rows.codes, rows.codes.stride(0), rows.scales, rows.stride, *tensors,
        x if bias is None else bias.contiguous(), out, by_expert.order, by_expert.blocks,
        top_k, outputs, inputs, *sizes, alpha, limit,
        GATED=bool(act), ACT=act, BIAS=bias is not None,
        BM=by_expert.rows, **meta, **tiles,
    )  # fmt: skip


OPS = {
    "fused_experts": fused_experts,
    "pack_experts": pack_experts,
    "pack_quantized_experts": pack_quantized_experts,
}
