"""Decode 4-bit codes stored in the order of tensor cores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from modulm.contracts.quantization import INPUTS, OUTPUTS, Axis, LinearSpec

__all__ = ["from_tiles", "tiled_axes"]

#: Rows of a tile, columns of a tile, and adjacent tiles along columns.
_ROWS, _COLUMNS, _INNER = 8, 16, 8
#: Columns of a lane's word relative to its first, by nibble; a word covers two tiles.
_WORD = (0, 8, 16, 24, 1, 9, 17, 25)


def tiled_axes(spec: LinearSpec) -> tuple[Axis, Axis]:
    """Return the axes of the output of `from_tiles`."""
    return (OUTPUTS, INPUTS)


def from_tiles(spec: LinearSpec) -> Callable[[Tensor], Tensor]:
    """Return a function [N / 8, K / 128, 32, 4] int32 -> [N, K] uint8 that drops padding."""
    inputs = spec.input_shard.total
    sizes = {shard.total for shard in spec.shards}
    sizes.add(sum(shard.total for shard in spec.shards))

    def unpack(stored: Tensor) -> Tensor:
        if stored.dim() != 4 or stored.shape[2:] != (32, _INNER // 2):
            raise ValueError(f"shape {list(stored.shape)} is not tiled")
        tall, wide = stored.shape[:2]
        at = torch.arange(8, device=stored.device) * 4
        codes = ((stored[..., None] >> at) & 15).to(torch.uint8)
        # [row tile, column tile, row within tile, lane of the row, pair of tiles, nibble]
        codes = codes.view(tall, wide, _ROWS, 4, _INNER // 2, 8)
        first = torch.tensor(_WORD, device=stored.device)
        lanes = torch.arange(4, device=stored.device) * 2
        pairs = torch.arange(_INNER // 2, device=stored.device) * 2 * _COLUMNS
        columns = (lanes[:, None, None] + pairs[None, :, None] + first).flatten()
        laid = codes.permute(0, 2, 1, 3, 4, 5).reshape(tall * _ROWS, wide, -1)
        laid = laid[..., columns.argsort()].flatten(1)
        fitting = [size for size in sizes if -(-size // _ROWS) == tall]
        if not fitting or laid.shape[1] < inputs:
            raise ValueError(f"{tall * _ROWS} x {laid.shape[1]} is not {sorted(sizes)} x {inputs}")
        return laid[: fitting[0], :inputs]

    return unpack
