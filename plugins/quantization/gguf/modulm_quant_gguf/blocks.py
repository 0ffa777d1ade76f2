"""Decoded form of ggml's block types: integers, scales and minima (ggml-common.h of ggml).

A decoder takes blocks [n, bytes] and returns `Decoded` with the columns of each block side by side.
Arithmetic is fp32 in ggml's order, so weights are bit-identical to ggml's.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from modulm_quantized import Codes

__all__ = ["TABLES", "Decoded", "bits_of", "half", "planes"]

#: Values of four-bit codes, by the kernels' names: doubled e2m1 floats, and the IQ4 values.
TABLES = {
    "e2m1": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}
#: Largest zero point that is stored in 16 bits.
_LARGEST_ZERO = 2048.0
#: Largest relative error, to the largest scale of a row, for storing scales in 16 bits.
_LOSS = 2.0**-11


@frozen(eq=False)
class Decoded:
    """Decoded rows: column k is scale * (value - offset) - minimum, of the group of k.

    values: [N, K] int8, or uint8 below 16. table: the name of a table in TABLES that maps values,
    or None. scales: [N, groups] fp32. offsets: a number, or [N, groups] fp32. minima: [N, groups]
    fp32, or None for 0.
    """

    values: Tensor
    scales: Tensor
    offsets: float | Tensor = 0.0
    minima: Tensor | None = None
    table: str = ""

    def rows(self, count: int) -> Decoded:
        """Reshape the decoded blocks to `count` rows."""
        wide = [
            part.reshape(count, -1) if isinstance(part, Tensor) else part
            for part in (self.values, self.scales, self.offsets, self.minima)
        ]
        return Decoded(*wide, table=self.table)  # type: ignore[arg-type]

    def weight(self) -> Tensor:
        """Return [N, K] fp32, bit-identical to ggml."""
        groups = self.scales.shape[1]
        numbers = self.values.to(torch.float32)
        if self.table:
            table = torch.tensor(TABLES[self.table], dtype=torch.float32, device=numbers.device)
            numbers = table[self.values.int()]
        wide = torch.unflatten(numbers, 1, (groups, -1))
        offsets = self.offsets
        wide = wide - (offsets[..., None] if isinstance(offsets, Tensor) else offsets)
        wide = wide * self.scales[..., None]
        if self.minima is not None:
            wide = wide - self.minima[..., None]
        return wide.flatten(1)

    def codes(self, dtype: torch.dtype) -> Codes:
        """Return codes with zero points. Scales are stored in 16 bits if `dtype` is a 16-bit type
        and the error is below its rounding.
        """
        values, scales = self.values, self.scales
        zeros = self.offsets
        if self.minima is not None:
            # A group with scale 0 is constant: encode its minimum as value 0 with zero point 1.
            flat = (scales == 0) & (self.minima != 0)
            values = _where_groups(flat, torch.zeros_like(values), values)
            scales = torch.where(flat, self.minima, scales)
            zeros = zeros + torch.where(scales == 0, 0.0, self.minima / scales)
        elif isinstance(zeros, float):
            zeros = torch.full_like(scales, zeros) if zeros else None  # type: ignore[assignment]
        points = zeros if isinstance(zeros, Tensor) else None
        if dtype != torch.float32 and _fits(scales, points):
            scales = scales.half()
        table = torch.tensor(TABLES[self.table], dtype=torch.float32) if self.table else None
        return Codes(values, scales, points, levels=table)


def _where_groups(chosen: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Take `first` in the chosen groups, `second` elsewhere."""
    size = first.shape[1] // chosen.shape[1]
    return torch.where(chosen.repeat_interleave(size, 1), first, second)


def _fits(scales: Tensor, zeros: Tensor | None) -> bool:
    """Whether 16 bits represent the scales and zero points accurately enough."""
    lost = (scales.half().float() - scales).abs()
    most = scales.abs().amax(1, keepdim=True) * _LOSS
    small = zeros is None or bool((zeros.abs() <= _LARGEST_ZERO).all())
    return small and bool((lost <= most).all())


def half(blocks: Tensor, at: int) -> Tensor:
    """Read the 16-bit float at byte `at` of each block: [n, 1] fp32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).to(torch.float32)


def planes(packed: Tensor, span: int, bits: int) -> Tensor:
    """Unpack numbers of `bits` bits, `span` consecutive ones sharing bytes: [n, columns].

    The first `span` numbers are in the lowest bits of these bytes, the next ones above them.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    spans = packed.reshape(len(packed), -1, 1, span) >> shifts[:, None]
    return (spans & (1 << bits) - 1).flatten(1)


def bits_of(packed: Tensor) -> Tensor:
    """Return the bits of each byte, lowest first: [n, 8 bytes] uint8."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[..., None] >> shifts & 1).flatten(1)
