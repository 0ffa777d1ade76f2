"""Rows of a table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modulm_kernels_triton.launch import cut, launch, power_of_two
from modulm_kernels_triton.tuning import tuned

__all__ = ["OPS", "embedding"]


@triton.jit
def _embedding(ids, weight, out, rows, size, weight_row, out_row, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    row = tl.load(ids + token).to(tl.int64)
    held = (row >= 0) & (row < rows)
    found = tl.load(weight + row * weight_row + at, inside & held, other=0.0)
    tl.store(out + token * out_row + at, found, inside)


def embedding(ids: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """The op `embedding`. An id that the table does not hold gives zeros: of a vocabulary in
    parts, each device looks up its own ids less its first one, and the results are added up.
    """
    rows, size = weight.shape
    made = torch.empty(*ids.shape, size, dtype=weight.dtype, device=ids.device)
    made = made if out is None else out
    flat = made.view(-1, size)
    constants = dict(tuned("embedding"))
    block = min(power_of_two(size), constants.pop("BLOCK"))
    launch(
        _embedding, (ids.numel(), cut(size, block)), ids.contiguous(), weight, flat, rows, size,
        weight.stride(0), flat.stride(0), BLOCK=block, **constants,
    )  # fmt: skip
    return made


OPS = {"embedding": embedding}
