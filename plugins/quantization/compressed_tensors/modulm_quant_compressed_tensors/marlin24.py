"""Decode 2:4 sparse layers stored in the order of a GPU kernel (`marlin-24`).

`weight_packed` [K / 32, words] holds codes of half of the inputs, input by input, in tiles of 16
inputs and 64 outputs in the order of a warp's 32 lanes. `meta` [K / 32, 2 N] holds the indices of
those inputs, 2 bits each, with rows and columns in the order of sparse tensor cores. `scale_packed`
[groups, N] holds scales in lane order. Source: format marlin-24 of compressed-tensors 0.11, which
only writes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modulm_quantized import unpack_words

__all__ = ["dense_codes", "plain_scales"]

_TILE, _WIDE, _QUADS = 16, 64, 4
#: For each position in a word, by bits: the index among eight adjacent values.
_PLACES = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
_SCALES = (0, 4, 1, 5, 2, 6, 3, 7)


def dense_codes(words: Tensor, meta: Tensor, bits: int) -> Tensor:
    """Return [N, K] unsigned codes; inputs that are not stored get the code of zero."""
    packed = unpack_words(words, bits, 1).long().reshape(-1, _TILE * _WIDE)
    tiles = torch.empty_like(packed)
    tiles[:, _order(bits)] = packed
    rows, outputs = words.shape[0], meta.shape[1] // 2
    by_output = tiles.view(rows, outputs // _TILE, _TILE, _TILE).transpose(1, 2)
    stored = by_output.reshape(rows * _TILE, outputs).T
    inputs = _input_indices(meta)
    codes = stored.new_full((outputs, 2 * stored.shape[1]), 2 ** (bits - 1))
    return codes.scatter_(1, inputs, stored)


def plain_scales(packed: Tensor, inputs: int, group: int) -> Tensor:
    """Return [N, groups] in natural order from `scale_packed`."""
    if not 0 < group < inputs // 2:
        return packed.T
    order = torch.tensor(_SCALES)
    scales = torch.empty_like(packed).view(-1, len(_SCALES))
    scales[:, order] = packed.reshape(-1, len(_SCALES))
    return scales.view_as(packed).T


def _order(bits: int) -> Tensor:
    """Return, for each of the 1,024 values in a row of four tiles, the index that it comes from."""
    lane, column, half, item = torch.meshgrid(*map(torch.arange, (32, 4, 2, 4)), indexing="ij")
    row = lane % 4 * 2 + item % 2 + item // 2 * 8
    tile, side = lane // 8, lane // 4 % 2
    index = (tile * _TILE + row) * _TILE + side * 8 + half * 4 + column
    within = torch.tensor(_PLACES[bits])
    return index.reshape(-1, len(within))[:, within].flatten()


def _input_indices(meta: Tensor) -> Tensor:
    """Return [N, K / 2]: the input index of each stored value."""
    outputs, columns = meta.shape[1] // 2, meta.shape[0] * 2
    stored = meta.view(torch.int16).reshape(meta.shape[0], outputs, 2).int() & 0xFFFF
    row, column = torch.meshgrid(torch.arange(outputs), torch.arange(columns), indexing="ij")
    at = row // 64 * 64 + row % 2 * 2 + row % 8 // 4 + row % 4 // 2 * 32 + row % 64 // 8 * 4
    swapped = ((at % 2 == 0) & (column % 2 == 1)).int() - ((at % 2 == 1) & (column % 2 == 0)).int()
    at, column = at + swapped, column - swapped
    quads = stored[column // 2, at, column % 2][..., None] >> 4 * torch.arange(_QUADS)
    pairs = torch.stack([quads & 3, quads >> 2 & 3], -1).flatten(1, 2)
    return (pairs + 4 * torch.arange(pairs.shape[1])[:, None]).flatten(1).long()
