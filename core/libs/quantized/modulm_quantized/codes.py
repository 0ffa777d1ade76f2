"""Weights as integer codes with scales and zero points."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import evolve, frozen
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CodedExperts", "Codes"]


@frozen(eq=False)
class Codes:
    """A weight [N, K]: column k of row n is scale * (value - zero) of k's group.

    values: [N, K] uint8, int8 or an 8-bit float. scales: [N, groups] of any float dtype, one per K
    / groups adjacent columns. zeros: like scales, or None for 0. order: [K] int64 or None; column j
    belongs to input order[j], for groups of non-adjacent inputs. levels: fp32 lookup table for
    uint8 values; None if the values are the numbers.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None
    levels: Tensor | None = None

    @property
    def group(self) -> int:
        """Number of columns that share a scale."""
        return self.values.shape[1] // self.scales.shape[1]

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight [N, K], inputs in the layer's order."""
        numbers = self.values
        if self.levels is not None:
            numbers = self.levels.to(numbers.device)[numbers.int()]
        grouped = torch.unflatten(numbers.to(torch.float32), 1, (self.scales.shape[1], -1))
        if self.zeros is not None:
            grouped = grouped - self.zeros[..., None].to(torch.float32)
        wide: Tensor = (grouped * self.scales[..., None].to(torch.float32)).flatten(1)
        if self.order is not None:
            wide = torch.empty_like(wide).index_copy_(1, self.order, wide)
        return wide.to(dtype)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that belong to this weight only, by name."""
        tensors = {name: getattr(self, name) for name in ("values", "scales", "zeros", "order")}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def rows(self, rows: slice) -> Codes:
        """Return the codes of some outputs."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return evolve(self, values=self.values[rows], scales=self.scales[rows], zeros=zeros)

    def in_groups_of(self, size: int) -> Codes:
        """Return the same weight with scales for groups of `size`, which divides the group."""
        times = self.group // size
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(times, 1)
        return evolve(self, scales=self.scales.repeat_interleave(times, 1), zeros=zeros)


@frozen(eq=False)
class CodedExperts:
    """A stack of experts as codes; `stack[e]` is the weight [N, K] of one expert in `dtype`."""

    codes: list[Codes]
    dtype: torch.dtype

    def __getitem__(self, expert: int) -> Tensor:
        return self.codes[expert].weight(self.dtype)

    def grow(self, experts: int) -> None:
        """Add slots for `experts` experts; new ones repeat the last."""
        self.codes.extend([self.codes[-1]] * (experts - len(self.codes)))

    def memory(self, expert: int) -> tuple[Tensor, ...]:
        """Return the tensors of one expert, for reading."""
        return tuple(self.codes[expert].tensors().values())

    def put(self, expert: int, memory: Sequence[Tensor]) -> None:
        """Replace an expert by the tensors of another one."""
        tensors = dict(zip(self.codes[expert].tensors(), memory, strict=True))
        self.codes[expert] = evolve(self.codes[expert], **tensors)
