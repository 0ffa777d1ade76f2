"""Prompts whose tokens count along time, height and width: M-RoPE (Qwen2-VL, arXiv 2409.12191)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from modulm_media.family import MediaFamily, Processed

__all__ = ["GridFamily"]

#: (frames, rows, columns) of patches.
Grid = Sequence[int]


class GridFamily(MediaFamily):
    """Images and videos are grids of patches, which the processor gives as `image_grid_thw` and
    `video_grid_thw`; squares of `vision_config.spatial_merge_size` patches are a token.
    """

    kinds = ("image", "video")

    def positions(
        self, tokens: np.ndarray, items: Sequence[tuple[int, Processed]]
    ) -> np.ndarray | None:
        merge = int(self.config.get("vision_config", {}).get("spatial_merge_size", 2))
        places, paces = [], []
        for first, item in items:
            ((frames, rows, columns),) = item.tensors[f"{item.kind}_grid_thw"].tolist()
            # The frames of a video may lie apart, with text between them.
            runs = item.runs
            grid = (frames // len(runs), rows, columns)
            places += [(first + begin, first + end, grid) for begin, end in runs]
            paces += [self.pace(item)] * len(runs)
        return _on_grids(len(tokens), places, merge, paces)

    def pace(self, item: Processed) -> float:
        """How far frames are apart in time."""
        return 1.0


def _on_grids(
    length: int, items: Sequence[tuple[int, int, Grid]], merge: int, paces: Sequence[float] = ()
) -> np.ndarray:
    """[3, length] int64, the positions of a prompt's tokens in time, height and width.

    items: (first token, end, grid of patches) of the placeholder tokens of images and videos.
    paces: how far the frames of each are apart in time, 1 where none are given. Text goes on behind
    the largest position of an item's sides.
    """
    found = np.zeros((3, length), dtype=np.int64)
    at = position = 0
    for place, (first, end, (frames, rows, columns)) in enumerate(items):
        found[:, at:first] = position + np.arange(first - at)
        position += first - at
        shape = (frames, rows // merge, columns // merge)
        places = np.indices(shape).reshape(3, -1)
        if paces:
            places[0] = (places[0].astype(np.float32) * np.float32(paces[place])).astype(np.int64)
        found[:, first:end] = places + position
        position += max(shape[1:])
        at = end
    found[:, at:] = position + np.arange(length - at)
    return found
