"""Calls of ops on small tensors, which compile their kernels ahead of time.

Which kernels a model needs depends on how it is stored; all common ones are called here. Grids and
numbers of rows do not change kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

import modulm_kernels_triton
from modulm.contracts.model import StatePlan
from modulm_adapters.lora_ops import LoraPiece, LoraTable, SlotBlocks, SlotGroups
from modulm_kernels_triton.by_expert import sort_by_expert
from modulm_kernels_triton.device import fp8_products
from modulm_kernels_triton.rms_norm_rounded import FORMATS

__all__ = ["KINDS", "Shape"]

#: Formats of inputs and weights, and inputs that share a weight's scale.
_SCALED = (
    ("fp8_token", "fp8", 0), ("mxfp8", "fp8", 32), ("mxfp8", "e2m1", 32), ("mxfp4", "e2m1", 32),
    ("nvfp4", "e2m1", 16),
)  # fmt: skip
_VOCABULARY, _EXPERTS, _TOP_K, _GROUP = 8192, 128, 8, 128


class Shape(Protocol):
    """Sizes of a model."""

    @property
    def hidden(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...


def sampling(shape: Shape) -> None:
    """Greedy rows, sampling with and without filters, log probabilities, penalties, masks."""
    ops = modulm_kernels_triton.ops()
    logits, ids = torch.zeros(2, _VOCABULARY), torch.zeros(2, dtype=torch.int64)
    some, k = torch.ones(2), torch.ones(2, dtype=torch.int32)
    ops["argmax"](logits.to(shape.dtype))
    ops["argmax"](logits)
    for filters in ((None, None, None), (k, some, None), (None, some, None), (k, some, some)):
        ops["sample_blind"](logits, some, *filters, some.double())
    ops["filter_logits"](logits, some, k, some, some)
    for normalise in (True, False):
        ops["top_logprobs"](logits, ids, 2, normalise)
    ops["apply_penalties"](logits, ids, ids, some, some, some, some)
    ops["apply_bitmask"](logits, ids, torch.zeros(2, _VOCABULARY // 32, dtype=torch.int32))


def coded_layers(shape: Shape) -> None:
    """Linear layers of int4 in groups, int8, and fp8 in blocks, for few rows and for many."""
    ops = modulm_kernels_triton.ops()
    size = (shape.intermediate, shape.hidden)
    groups = torch.ones(shape.intermediate, shape.hidden // _GROUP)
    rounded = "fp8" if fp8_products() else "bf16"
    fp8 = torch.zeros(size, dtype=torch.float8_e4m3fn)
    stored = (
        ops["pack_quantized"](torch.zeros(size, dtype=torch.uint8), "int4", _GROUP, groups, groups),
        ops["pack_quantized"](
            torch.zeros(size, dtype=torch.int8), "int8", 0, groups[:, :1], None, "int8"
        ),
        ops["pack_quantized"](fp8, "fp8", _GROUP, groups, None, rounded),
    )
    for packed in stored:
        for rows in (1, 512):
            ops["linear"](torch.zeros(rows, shape.hidden, dtype=shape.dtype), packed)


def low_precision(shape: Shape) -> None:
    """Linear layers and experts with inputs quantized by token, and in blocks with scales."""
    ops = modulm_kernels_triton.ops()
    size = (shape.intermediate, shape.hidden)
    inner, top_k = 256, 2
    rows = torch.zeros(2, shape.hidden, dtype=shape.dtype)
    for form in FORMATS:
        scale = torch.ones(()) if form == "fp8_static" else None
        ops["rms_norm_rounded"](rows, rows.clone(), rows[0], 1e-6, form, scale)
    for activations, form, group in _SCALED:
        kind = torch.float8_e4m3fn if form == "fp8" else torch.uint8
        scales = torch.ones(size[0], size[1] // group if group else 1)
        scales = scales if group != 32 else torch.full_like(scales, 120, dtype=torch.uint8)
        codes = torch.zeros(size, dtype=kind)
        packed = ops["pack_quantized"](codes, form, group, scales, None, activations)
        for rows in (1, 512):
            ops["linear"](torch.zeros(rows, shape.hidden, dtype=shape.dtype), packed)

        def stack(outputs: int, inputs: int, parts: int) -> object:
            codes = torch.zeros(outputs, inputs, dtype=kind)  # noqa: B023  used at once
            groups = inputs // group if group else 1  # noqa: B023
            one = (codes, scales[:1, :1].expand(outputs, groups), None)  # noqa: B023
            pack = ops["pack_quantized_experts"]
            return pack([one], 1, form, group, parts, activations)  # noqa: B023

        gate_up, down = stack(2 * inner, shape.hidden, 2), stack(shape.hidden, inner, 1)
        for tokens in (8, 256):
            x = torch.zeros(tokens, shape.hidden, dtype=shape.dtype)
            ids = torch.zeros(tokens, top_k, dtype=torch.int64)
            ops["fused_experts"](x, torch.zeros(tokens, top_k), ids, gate_up, down)


def experts(shape: Shape) -> None:
    """Routing, and experts of floats, for few tokens and for many."""
    ops = modulm_kernels_triton.ops()
    inner = shape.intermediate % 16 + 256
    gate_up = torch.zeros(1, 2 * inner, shape.hidden, dtype=shape.dtype)
    down = torch.zeros(1, shape.hidden, inner, dtype=shape.dtype)
    ops["moe_route"](torch.zeros(2, _EXPERTS, dtype=shape.dtype), _TOP_K)
    for tokens in (2, 8, 128):
        x = torch.zeros(tokens, shape.hidden, dtype=shape.dtype)
        ids = torch.zeros(tokens, _TOP_K, dtype=torch.int64)
        sort_by_expert(ids, _EXPERTS, 16)
        ops["fused_experts"](x, torch.zeros(tokens, _TOP_K), ids, gate_up, down)


def recurrence(shape: Shape) -> None:
    """Convolutions, scans and delta rules of the usual sizes, for a prompt beside a decode."""
    ops = modulm_kernels_triton.ops()
    tokens, heads, dim, size = 3, 4, 64, 128
    plan = StatePlan(
        slots=torch.arange(2),
        fresh=torch.zeros(2, dtype=torch.bool),
        query_starts=torch.tensor([0, 1, tokens], dtype=torch.int32),
        counts=(1, tokens - 1),
        starts=(0, 0),
    )

    def zeros(*sizes: int) -> torch.Tensor:
        return torch.zeros(tokens, *sizes, dtype=shape.dtype)

    weight = torch.zeros(shape.hidden, 1, 4, dtype=shape.dtype)
    states = torch.zeros(2, 3, shape.hidden, dtype=shape.dtype)
    ops["causal_conv"](zeros(shape.hidden), weight, None, True, states, plan)
    rates, pair = torch.zeros(heads), zeros(2, size)
    scan = (zeros(heads, dim), zeros(heads), rates[:, None], pair, pair, rates)
    ops["selective_scan"](*scan, torch.zeros(2, heads, dim, size), plan, rates)
    channels = (zeros(heads, 1), zeros(heads), rates[:, None].expand(heads, 16).contiguous())
    few = zeros(1, 16)
    ops["selective_scan"](*channels, few, few, rates, torch.zeros(2, heads, 1, 16), plan, rates)
    delta = (pair, pair, zeros(heads, size), zeros(heads), zeros(heads), rates, rates)
    ops["delta_rule"](*delta, torch.zeros(2, heads, size, size), plan)


def adapters(shape: Shape) -> None:
    """Low-rank additions."""
    table = LoraTable(1, 1, shape.hidden, shape.dtype, rank=64, widest=shape.hidden)
    groups, blocks = SlotGroups(1), SlotBlocks(1, torch.device("cpu"))
    rank = torch.zeros(16, shape.hidden, dtype=shape.dtype)
    table.put(1, [LoraPiece(rank, rank)])
    groups.set(np.ones(2, dtype=np.int32))
    x = torch.zeros(2, shape.hidden, dtype=shape.dtype)
    modulm_kernels_triton.ops()["add_lora"](x.clone(), x, groups, table)
    blocks.set(groups, lambda arrays: [torch.from_numpy(array) for array in arrays])
    modulm_kernels_triton.ops()["add_lora_blocks"](x.clone(), x, blocks, table)


#: In order of how often they are needed.
KINDS: tuple[Callable[[Shape], None], ...] = (
    sampling, coded_layers, experts, adapters, recurrence, low_precision
)  # fmt: skip
