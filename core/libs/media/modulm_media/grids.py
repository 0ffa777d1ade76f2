"""Prompts whose positions count time, height and width: M-RoPE (Qwen2-VL, arXiv 2409.12191)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import evolve

from modulm_media.family import MediaFamily, Processed

__all__ = ["GridFamily", "pruned", "retained"]

#: (frames, rows, columns) of patches.
Grid = Sequence[int]


class GridFamily(MediaFamily):
    """Images and videos as grids of patches.

    The processor returns the grids as `image_grid_thw` and `video_grid_thw`; squares of
    `vision_config.spatial_merge_size` patches form one token.
    """

    kinds = ("image", "video")

    def positions(
        self, tokens: np.ndarray, items: Sequence[tuple[int, Processed]]
    ) -> np.ndarray | None:
        merge = int(self.config.get("vision_config", {}).get("spatial_merge_size", 2))
        grids, paces = [], []
        for first, item in items:
            ((frames, rows, columns),) = item.tensors[f"{item.kind}_grid_thw"].tolist()
            # The frames of a video may be separated by text.
            runs = item.runs
            grid = (frames // len(runs), rows, columns)
            grids += [(first + begin, first + end, grid) for begin, end in runs]
            paces += [self.pace(item)] * len(runs)
        return _on_grids(len(tokens), grids, merge, paces)

    def pace(self, item: Processed) -> float:
        """Distance between frames on the time axis."""
        return 1.0


def retained(frames: int, per_frame: int, rate: float) -> int:
    """Tokens of a video that remain when a share `rate` of them is left out; at least one frame."""
    return max(per_frame, int(frames * per_frame * (1 - rate)))


def pruned(item: Processed, rate: float, merge: int, pace: float) -> Processed:
    """Leave out tokens of a video, whose encoder chooses those that remain.

    Its tensors get `video_kept`, their number, and `video_positions`, [3, tokens] int64: where each
    token of the whole video is, relative to its first. pace: see `GridFamily.pace`.
    """
    ((frames, rows, columns),) = item.tensors[f"{item.kind}_grid_thw"].tolist()
    shape = (frames, rows // merge, columns // merge)
    ((begin, end),) = item.runs
    kept = retained(frames, shape[1] * shape[2], rate)
    inside = np.ones(len(item.tokens), dtype=bool)
    inside[begin + kept : end] = False
    more = {"video_kept": np.array([kept]), "video_positions": _offsets(shape, pace)}
    tensors = {**item.tensors, **more}
    tokens, embedded = item.tokens[inside], item.embedded[inside]
    return evolve(item, tokens=tokens, embedded=embedded, tensors=tensors)


def _offsets(shape: tuple[int, int, int], pace: float | None) -> np.ndarray:
    """[3, tokens] int64 positions relative to the first token's, in time, height and width."""
    offsets = np.indices(shape).reshape(3, -1)
    if pace is not None:
        offsets[0] = (offsets[0].astype(np.float32) * np.float32(pace)).astype(np.int64)
    return offsets


def _on_grids(
    length: int, items: Sequence[tuple[int, int, Grid]], merge: int, paces: Sequence[float] = ()
) -> np.ndarray:
    """[3, length] int64 positions of a prompt's tokens in time, height and width.

    items: (first token, end, grid of patches) of the placeholders of images and videos. paces:
    distance between the frames of each on the time axis, 1 if empty. Text continues after the
    largest position of an item.
    """
    positions = np.zeros((3, length), dtype=np.int64)
    at = position = 0
    for index, (first, end, (frames, rows, columns)) in enumerate(items):
        positions[:, at:first] = position + np.arange(first - at)
        position += first - at
        shape = (frames, rows // merge, columns // merge)
        offsets = _offsets(shape, paces[index] if paces else None)
        if end - first < offsets.shape[1]:  # the encoder chooses which of them remain
            offsets = np.zeros((3, 1), dtype=np.int64)
        positions[:, first:end] = offsets + position
        position += max(shape[1:])
        at = end
    positions[:, at:] = position + np.arange(length - at)
    return positions
