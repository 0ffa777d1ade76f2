"""Split images into tiles."""

from __future__ import annotations

import numpy as np

__all__ = ["shapes", "split"]


def shapes(most: int) -> np.ndarray:
    """Return [n, 2]: rows and columns of all layouts of up to `most` tiles, fewest tiles first."""
    layouts = [(h, w) for w in range(1, most + 1) for h in range(1, most // w + 1)]
    return np.array(sorted(layouts, key=lambda shape: shape[0] * shape[1]))


def split(image: np.ndarray, rows: int, columns: int) -> list[np.ndarray]:
    """Split an image into tiles, row by row."""
    return [
        tile for row in np.split(image, rows, axis=1) for tile in np.split(row, columns, axis=2)
    ]
