"""Look up rows of a table."""

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
    valid = (row >= 0) & (row < rows)
    values = tl.load(weight + row * weight_row + at, inside & valid, other=0.0)
    tl.store(out + token * out_row + at, values, inside)


def embedding(ids: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """The op `embedding`. Ids outside the table give zeros: with a split vocabulary, each device
    subtracts its first id and looks up its own ids, and the results are summed.
    """
    rows, size = weight.shape
    result = torch.empty(*ids.shape, size, dtype=weight.dtype, device=ids.device)
    result = result if out is None else out
    flat = result.view(-1, size)
    constants = dict(tuned("embedding"))
    block = min(power_of_two(size), constants.pop("BLOCK"))
    launch(
        _embedding, (ids.numel(), cut(size, block)), ids.contiguous(), weight, flat, rows, size,
        weight.stride(0), flat.stride(0), BLOCK=block, **constants,
    )  # fmt: skip
    return result


OPS = {"embedding": embedding}
