"""Decode layers with 2:4 sparsity that are stored without zeros.

`compressed` [N, K / 2] holds the non-zero values in order, `bitmask` [N, K / 8] one bit per input,
the first in the lowest bit. Source: sparse-24-bitmask of compressed-tensors 0.11.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modulm.contracts.quantization import LinearSpec
from modulm.errors import CheckpointError

__all__ = ["dense"]


def dense(compressed: Tensor, bitmask: Tensor, spec: LinearSpec) -> Tensor:
    """Return [N, K] in the dtype of `compressed`. Raises CheckpointError if bit counts differ."""
    bits = (bitmask[..., None] >> torch.arange(8, device=bitmask.device)) & 1
    mask = bits.flatten(1).bool()
    if bool((mask.sum(1) != compressed.shape[1]).any()):
        raise CheckpointError(
            f"{spec.name}.bitmask: rows need {compressed.shape[1]} of {spec.inputs} bits set"
        )
    raw = compressed.view(torch.uint8) if compressed.dtype.itemsize == 1 else compressed
    weight = torch.zeros(mask.shape, dtype=raw.dtype, device=raw.device)
    return weight.masked_scatter_(mask, raw).view(compressed.dtype)
