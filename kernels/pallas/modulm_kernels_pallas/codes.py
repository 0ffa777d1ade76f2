"""Weights as codes: the ops `pack_quantized` and `linear`, and stacks of experts made of them.

JAX is imported by the first product on a device, never with this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from attrs import define
from torch import Tensor

__all__ = ["OPS", "PackedCodes"]

#: Numbers that 4-bit codes stand for: doubled e2m1 floats (OCP Microscaling Formats, version 1.0)
#: and ggml's IQ4. They are held as 8-bit integers.
_TABLES = {
    "e2m1": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}
_CENTRE = 8


@define(eq=False)
class PackedCodes:
    """A weight [N, K] as `linear.Codes`, of tensors: on the host, or on the device in a model."""

    data: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.data.shape[0], self.data.shape[1] * (2 if self.bits == 4 else 1)

    def weight(self) -> Tensor:
        """Return the dequantized weight [N, K] bf16, on the host."""
        data = self.data
        if self.bits == 4:
            data = torch.cat([data << 4 >> 4, data >> 4], 1)
        parts = data.float().unflatten(1, (len(self.scales), -1))
        if self.zeros is not None:
            parts = parts - self.zeros[:, 0].T[..., None]
        return (parts * self.scales[:, 0].T[..., None]).flatten(1).bfloat16()

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + b; x: [..., K]."""
        from modulm_kernels_pallas import linear as kernel
        from modulm_kernels_pallas.bridge import array_of, is_array, tensor_of
        from modulm_kernels_pallas.spread import kernel_use

        if not is_array(x):
            return F.linear(x, self.weight().to(x.dtype), bias)
        codes = kernel.Codes(
            array_of(self.data), array_of(self.scales),
            None if self.zeros is None else array_of(self.zeros), self.bits,
        )  # fmt: skip
        rows, use = array_of(x), kernel_use()
        added = None if bias is None else array_of(bias)
        flat = rows.reshape(-1, rows.shape[-1])
        if use is None or kernel.misfit(codes) is not None:
            out = kernel.linear_plain(flat, codes, added)
        else:
            out = kernel.linear(flat, codes, added, interpret=use == "interpret")
        return tensor_of(out.reshape(*rows.shape[:-1], -1))


def pack_linear(weight: Tensor) -> Tensor:
    """The op `pack_linear`: floats as they are."""
    return weight


def pack_quantized(
    weight: Tensor,
    format: str,  # noqa: A002  the word that the flags use
    group: int = 0,
    scales: Tensor | None = None,
    zeros: Tensor | None = None,
    activations: str = "bf16",
    input_scale: Tensor | None = None,
) -> PackedCodes:
    """The op `pack_quantized`. Activations stay in 16 bits.

    weight: [N, K]: int8, float8_e4m3fn, or for "int4", "e2m1" and "iq4" uint8 in 0..15. scales,
    zeros: [N, K / group]; a weight is scale * (code - zero); uint8 scales are exponents of two plus
    127. zeros default to 0, for int4 to 8. group: 0 means all of K.
    """
    if scales is None:
        raise ValueError(f"scales must be given for {format}")
    table = scales.reshape(len(weight), -1)
    table = torch.exp2(table.float() - 127) if table.dtype == torch.uint8 else table.float()
    offsets = None if zeros is None else zeros.reshape(table.shape).float()
    bits, data = 8, weight.detach()
    if format == "int4":
        offsets = None if offsets is None else offsets - _CENTRE
        data, bits = (data.to(torch.int8) - _CENTRE), 4 if weight.shape[1] % 2 == 0 else 8
    elif format in _TABLES:
        data = torch.tensor(_TABLES[format], dtype=torch.int8)[data.int()]
    if bits == 4:
        low, high = data.chunk(2, 1)
        data = (low & 15) | (high << 4)
    return PackedCodes(
        data.contiguous(), _by_group(table), None if offsets is None else _by_group(offsets), bits
    )


def _by_group(table: Tensor) -> Tensor:
    return table.T[:, None].contiguous()


def linear(
    x: Tensor, packed: Tensor | PackedCodes, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """The op `linear`; x: [..., K] -> [..., N] in x's dtype."""
    if isinstance(packed, PackedCodes):
        result = packed.multiply(x, bias)
    else:
        result = F.linear(x, packed, bias)
    return result if out is None else out.copy_(result)


def unpack_linear(packed: Tensor | PackedCodes) -> Tensor:
    """The op `unpack_linear`: the weight [N, K] in its float dtype, or dequantized to bf16."""
    return packed.weight() if isinstance(packed, PackedCodes) else packed


def pack_quantized_experts(
    stack: Iterable[tuple[Tensor, Tensor, Tensor | None]],
    experts: int,
    format: str,  # noqa: A002  the word that the flags use
    group: int = 0,
    parts: int = 1,
    activations: str = "bf16",
) -> Tensor:
    """The op `pack_quantized_experts`: a stack [experts, parts * N, K] bf16, dequantized."""
    weights = [
        pack_quantized(codes, format, group, scales, zeros).weight()
        for codes, scales, zeros in stack
    ]
    if len(weights) != experts:
        raise ValueError(f"expected {experts} experts, not {len(weights)}")
    return torch.stack(weights)


OPS: Mapping[str, Callable[..., Any]] = {
    "linear": linear,
    "pack_linear": pack_linear,
    "pack_quantized": pack_quantized,
    "pack_quantized_experts": pack_quantized_experts,
    "unpack_linear": unpack_linear,
}
