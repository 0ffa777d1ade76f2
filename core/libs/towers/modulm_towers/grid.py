"""Encoders of images as patch grids of any size, such as Qwen's (arXiv 2409.12191, 2502.13923).

The processor orders patches by the squares that are merged into one token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["axial_turns", "grid_coordinates", "interpolated", "lengths_of", "windows"]

#: (frames, rows, columns) of patches.
Grid = Sequence[int]


def grid_coordinates(grid: Grid, merge: int) -> Tensor:
    """[patches, 2] int64: row and column of each patch, in the processor's order."""
    frames, rows, columns = grid
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    shape = (rows // merge, merge, columns // merge, merge)
    pair = [t.reshape(shape).transpose(1, 2).flatten() for t in (row, column)]
    return torch.stack(pair, dim=-1).repeat(frames, 1)


def axial_turns(coordinates: Tensor, head_dim: int, theta: float = 10000.0) -> Tensor:
    """coordinates: [patches, 2] -> [patches, head_dim], cosines and sines of a rotation.

    The first half of the angles follow rows, the second half columns.
    """
    half = head_dim // 2
    waves = 1.0 / theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
    angles = (coordinates[:, :, None].float() * waves).flatten(1)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def lengths_of(grids: Sequence[Grid]) -> list[int]:
    """Lengths of the attention sequences: the patches of each frame."""
    return [rows * columns for frames, rows, columns in grids for _ in range(frames)]


def windows(grid: Grid, merge: int, size: int) -> tuple[Tensor, list[int]]:
    """([tokens] int64 order of the merged tokens, tokens per window) of one image.

    size: side of a window in tokens.
    """
    frames, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    tokens = torch.arange(frames * rows * columns).view(frames, rows, columns)
    parts = [
        frame[top : top + size, left : left + size].flatten()
        for frame in tokens
        for top in range(0, rows, size)
        for left in range(0, columns, size)
    ]
    return torch.cat(parts), [len(part) for part in parts]


def interpolated(table: Tensor, grid: Grid, coordinates: Tensor) -> Tensor:
    """Bilinear interpolation of learned positions.

    table: [side * side, hidden] -> [patches, hidden] for a grid of any size; corners are aligned.
    """
    side = round(len(table) ** 0.5)
    sizes = torch.tensor(grid[1:], dtype=torch.float32)
    scaled = coordinates.float() * ((side - 1) / (sizes - 1).clamp(min=1))
    low = scaled.floor().long()
    high = (low + 1).clamp(max=side - 1)
    part = (scaled - low).to(table.device)
    positions = torch.zeros(
        len(coordinates), table.shape[1], dtype=torch.float32, device=table.device
    )
    for rows, down in ((low[:, 0], 1 - part[:, 0]), (high[:, 0], part[:, 0])):
        for columns, across in ((low[:, 1], 1 - part[:, 1]), (high[:, 1], part[:, 1])):
            positions += table[(rows * side + columns).to(table.device)] * (down * across)[:, None]
    return positions
