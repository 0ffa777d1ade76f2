"""Values that planner and runner of media exchange."""

from __future__ import annotations

import numpy as np
from attrs import frozen

from modulm.contracts.media import MediaItem

__all__ = ["EncodePlan", "MediaRow"]


@frozen
class EncodePlan:
    """What encoders do in a step, before the model runs.

    items: (row, index of the item in its prompt) to encode. rows: budget of encoder rows (patches,
    frames) times layers for this step; 0 means no limit. Unfinished items continue in the next
    step. drop: hashes of outputs, finished or not, to discard.
    """

    items: tuple[tuple[int, int], ...] = ()
    rows: int = 0
    drop: tuple[bytes, ...] = ()


@frozen(eq=False)
class MediaRow:
    """The media of a row's prompt.

    items: items whose tokens encoder outputs replace. positions: [axes, tokens] int64 of the
    prompt, for models with several position axes; later tokens have `offset` + their index on every
    axis.
    """

    items: tuple[MediaItem, ...] = ()
    positions: np.ndarray | None = None
    offset: int = 0
