"""Tensor types of GGUF files by number (ggml.h, enum ggml_type)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from attrs import frozen
from torch import Tensor

from modulm.errors import CheckpointError
from modulm_quant_gguf import decoders, grids
from modulm_quant_gguf.blocks import Decoded

__all__ = ["NAMED", "NUMBERED", "Kind", "decode", "dequantize"]


@frozen(eq=False)
class Kind:
    """A tensor type: `block` columns take `bytes` bytes.

    Plain number types have a `dtype`, block types a `decode` function. name, number: ggml's.
    """

    name: str
    number: int
    block: int
    bytes: int
    dtype: torch.dtype | None = None
    decode: Callable[[Tensor], Decoded] | None = None


_KINDS = (
    Kind("F32", 0, 1, 4, torch.float32),
    Kind("F16", 1, 1, 2, torch.float16),
    Kind("Q4_0", 2, 32, 18, decode=decoders.q4_0),
    Kind("Q4_1", 3, 32, 20, decode=decoders.q4_1),
    Kind("Q5_0", 6, 32, 22, decode=decoders.q5_0),
    Kind("Q5_1", 7, 32, 24, decode=decoders.q5_1),
    Kind("Q8_0", 8, 32, 34, decode=decoders.q8_0),
    Kind("Q2_K", 10, 256, 84, decode=decoders.q2_k),
    Kind("Q3_K", 11, 256, 110, decode=decoders.q3_k),
    Kind("Q4_K", 12, 256, 144, decode=decoders.q4_k),
    Kind("Q5_K", 13, 256, 176, decode=decoders.q5_k),
    Kind("Q6_K", 14, 256, 210, decode=decoders.q6_k),
    Kind("IQ2_XXS", 16, 256, 66, decode=grids.iq2_xxs),
    Kind("IQ2_XS", 17, 256, 74, decode=grids.iq2_xs),
    Kind("IQ3_XXS", 18, 256, 98, decode=grids.iq3_xxs),
    Kind("IQ1_S", 19, 256, 50, decode=grids.iq1_s),
    Kind("IQ4_NL", 20, 32, 18, decode=decoders.iq4_nl),
    Kind("IQ3_S", 21, 256, 110, decode=grids.iq3_s),
    Kind("IQ2_S", 22, 256, 82, decode=grids.iq2_s),
    Kind("IQ4_XS", 23, 256, 136, decode=decoders.iq4_xs),
    Kind("I8", 24, 1, 1, torch.int8),
    Kind("I16", 25, 1, 2, torch.int16),
    Kind("I32", 26, 1, 4, torch.int32),
    Kind("I64", 27, 1, 8, torch.int64),
    Kind("F64", 28, 1, 8, torch.float64),
    Kind("IQ1_M", 29, 256, 56, decode=grids.iq1_m),
    Kind("BF16", 30, 1, 2, torch.bfloat16),
    Kind("TQ1_0", 34, 256, 54, decode=decoders.tq1_0),
    Kind("TQ2_0", 35, 256, 66, decode=decoders.tq2_0),
    Kind("MXFP4", 39, 32, 17, decode=decoders.mxfp4),
    Kind("NVFP4", 40, 64, 36, decode=decoders.nvfp4),
)
NUMBERED: Mapping[int, Kind] = {kind.number: kind for kind in _KINDS}
NAMED: Mapping[str, Kind] = {kind.name: kind for kind in _KINDS}


def decode(kind: Kind, stored: Tensor) -> Decoded:
    """Decode rows of blocks [N, bytes of a row]."""
    if kind.decode is None:
        raise CheckpointError(f"type {kind.name} has no blocks")
    return kind.decode(stored.reshape(-1, kind.bytes)).rows(len(stored))


def dequantize(kind: Kind, stored: Tensor) -> Tensor:
    """Convert stored rows of any type to fp32."""
    if kind.decode is None:
        return stored.to(torch.float32)
    leading = stored.shape[:-1]
    return decode(kind, stored.reshape(-1, stored.shape[-1])).weight().reshape(*leading, -1)
