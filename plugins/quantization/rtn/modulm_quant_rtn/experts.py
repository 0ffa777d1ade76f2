"""Rounding stacks of experts, one expert at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from modulm_quant_rtn.codes import Codes, round_weight

__all__ = ["CodedExperts", "round_experts"]


@frozen(eq=False)
class CodedExperts:
    """A stack as codes; `stack[e]` is the weight [N, K] of one expert in `dtype`."""

    codes: tuple[Codes, ...]
    dtype: torch.dtype

    def __getitem__(self, expert: int) -> Tensor:
        return self.codes[expert].weight(self.dtype)


def round_experts(
    weight: Tensor, form: str, group: int, parts: int, pack: Callable[..., Any] | None
) -> Any:
    """weight: [experts, N, K] -> what `fused_experts` takes: packed by `pack`, or codes."""
    codes = tuple(round_weight(one, form, group) for one in weight)
    if pack is None:
        return CodedExperts(codes, weight.dtype)
    values = torch.stack([_packable(each.values, form) for each in codes])
    scales = torch.stack([each.scales for each in codes])
    if form == "int8":
        return pack(values, form, parts, scales.squeeze(2))
    zeros = [each.zeros for each in codes if each.zeros is not None]
    return pack(values, form, parts, scales, torch.stack(zeros))


def _packable(values: Tensor, form: str) -> Tensor:
    """Codes of four bits two to a byte, the even one in the low half."""
    return values if form == "int8" else values[:, ::2] | values[:, 1::2] << 4
