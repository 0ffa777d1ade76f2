"""What planner and runner of media tell each other."""

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
    step. drop: hashes whose output, or what is done of it, nobody needs any more.
    """

    items: tuple[tuple[int, int], ...] = ()
    rows: int = 0
    drop: tuple[bytes, ...] = ()


@frozen(eq=False)
class MediaRow:
    """What a row brings.

    items: of its prompt, whose tokens an encoder's outputs replace. positions: [axes, tokens] int64
    of the prompt where a model counts positions along several axes; later tokens go on from
    `offset` + their position, the same on each axis.
    """

    items: tuple[MediaItem, ...] = ()
    positions: np.ndarray | None = None
    offset: int = 0
