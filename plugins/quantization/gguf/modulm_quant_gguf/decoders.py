"""Decoders of the block types that need no table: Q*_0, Q*_1, Q*_K, IQ4, TQ, MXFP4, NVFP4.

Layouts: ggml-common.h of ggml. A block of the K types has 256 columns in groups of 16 or 32, whose
scales (and minima) are integers of 4 to 8 bits times one float of the block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modulm_quant_gguf.blocks import Decoded, bits_of, half, planes

__all__ = [
    "iq4_nl", "iq4_xs", "mxfp4", "nvfp4", "q2_k", "q3_k", "q4_0", "q4_1", "q4_k", "q5_0", "q5_1",
    "q5_k", "q6_k", "q8_0", "tq1_0", "tq2_0",
]  # fmt: skip


def q4_0(b: Tensor) -> Decoded:
    return Decoded(planes(b[:, 2:], 16, 4), half(b, 0), 8.0)


def q4_1(b: Tensor) -> Decoded:
    return Decoded(planes(b[:, 4:], 16, 4), half(b, 0), minima=-half(b, 2))


def q5_0(b: Tensor) -> Decoded:
    values = planes(b[:, 6:], 16, 4) | bits_of(b[:, 2:6]) << 4
    return Decoded(values.to(torch.int8) - 16, half(b, 0))


def q5_1(b: Tensor) -> Decoded:
    values = planes(b[:, 8:], 16, 4) | bits_of(b[:, 4:8]) << 4
    return Decoded(values.to(torch.int8), half(b, 0), minima=-half(b, 2))


def q8_0(b: Tensor) -> Decoded:
    return Decoded(b[:, 2:].view(torch.int8), half(b, 0))


def q2_k(b: Tensor) -> Decoded:
    scales, minima = (b[:, :16] & 15).float(), (b[:, :16] >> 4).float()
    values = planes(b[:, 16:80], 32, 2)
    return Decoded(values, half(b, 80) * scales, minima=half(b, 82) * minima)


def q3_k(b: Tensor) -> Decoded:
    low, high = planes(b[:, 96:104], 8, 4), planes(b[:, 104:108], 4, 2)
    scales = (low | high << 4).to(torch.int8) - 32
    # A set bit adds four.
    values = planes(b[:, 32:96], 32, 2) | planes(b[:, :32], 32, 1) << 2
    return Decoded(values, half(b, 108) * scales.float(), 4.0)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack eight scales and eight minima from 12 bytes: [n, 8] fp32 each."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, rest & 15 | first >> 2 & 48], 1)
    minima = torch.cat([second & 63, rest >> 4 | second >> 2 & 48], 1)
    return scales.float(), minima.float()


def q4_k(b: Tensor) -> Decoded:
    scales, minima = _six_bits(b[:, 4:16])
    values = planes(b[:, 16:], 32, 4)
    return Decoded(values, half(b, 0) * scales, minima=half(b, 2) * minima)


def q5_k(b: Tensor) -> Decoded:
    scales, minima = _six_bits(b[:, 4:16])
    values = planes(b[:, 48:], 32, 4) | planes(b[:, 16:48], 32, 1) << 4
    return Decoded(values.to(torch.int8), half(b, 0) * scales, minima=half(b, 2) * minima)


def q6_k(b: Tensor) -> Decoded:
    values = planes(b[:, :128], 64, 4) | planes(b[:, 128:192], 32, 2) << 4
    scales = b[:, 192:208].contiguous().view(torch.int8).float()
    return Decoded(values.to(torch.int8) - 32, half(b, 208) * scales)


def iq4_nl(b: Tensor) -> Decoded:
    return Decoded(planes(b[:, 2:], 16, 4), half(b, 0), table="iq4")


def iq4_xs(b: Tensor) -> Decoded:
    shifts = torch.arange(0, 16, 2, device=b.device)
    high = (b[:, 2:3].int() | b[:, 3:4].int() << 8) >> shifts & 3
    low = planes(b[:, 4:8], 1, 4).int()
    scales = (low | high << 4) - 32
    return Decoded(planes(b[:, 8:], 16, 4), half(b, 0) * scales.float(), table="iq4")


def tq1_0(b: Tensor) -> Decoded:
    """Five ternary digits per byte, which holds their base-3 fraction."""
    digits = [
        _digits(part, span, count)
        for part, span, count in ((b[:, :32], 32, 5), (b[:, 32:48], 16, 5), (b[:, 48:52], 4, 4))
    ]
    return Decoded(torch.cat(digits, 1), half(b, 52), 1.0)


def _digits(packed: Tensor, span: int, count: int) -> Tensor:
    powers = 3 ** torch.arange(count, device=packed.device, dtype=torch.int32)
    shifted = packed.int().reshape(len(packed), -1, 1, span) * powers[:, None] & 255
    return (shifted * 3 >> 8).to(torch.uint8).flatten(1)


def tq2_0(b: Tensor) -> Decoded:
    # The fourth value of two bits is never written.
    return Decoded(planes(b[:, :64], 32, 2), half(b, 64), 1.0)


def mxfp4(b: Tensor) -> Decoded:
    """Values are doubled e2m1 numbers, so scales are halved."""
    scales = torch.ldexp(torch.ones(len(b), 1, device=b.device), b[:, :1].int() - 128)
    return Decoded(planes(b[:, 1:], 16, 4), scales, table="e2m1")


def nvfp4(b: Tensor) -> Decoded:
    """Four groups of 16 with scales of four exponent and three mantissa bits. Scales are halved,
    since values are doubled e2m1 numbers; 0x7f is zero.
    """
    exponent, mantissa = (b[:, :4] >> 3 & 15).int(), (b[:, :4] & 7).float()
    normal = torch.ldexp(1 + mantissa / 8, exponent - 8)
    scales = torch.where(exponent == 0, mantissa * 2.0**-10, normal)
    scales = torch.where(b[:, :4] == 0x7F, 0.0, scales)
    return Decoded(planes(b[:, 4:], 8, 4), scales, table="e2m1")
