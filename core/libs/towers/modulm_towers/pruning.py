"""Videos without the tokens that change least from frame to frame (EVS, arXiv 2510.14624).

An encoder's output for such a video has the tokens that remain, and columns with their positions,
which the text model's batch gets before its first layer. A position is two columns, of which both
are exact in bfloat16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.contracts.model import Batch

__all__ = ["placed", "without_repeats"]

_BASE = 256


def without_repeats(item: MediaItem, features: Tensor) -> Tensor:
    """The tokens of a video that remain, with the columns of their positions.

    features: [tokens, hidden] of the whole video. Other items are returned unchanged. The first
    frame remains whole.
    """
    if "video_kept" not in item.tensors:
        return features
    kept = int(item.tensors["video_kept"].reshape(-1)[0])
    frames = int(item.tensors["video_grid_thw"].reshape(-1)[0])
    each = features.view(frames, -1, features.shape[1]).float()
    changes = 1 - F.cosine_similarity(each[1:], each[:-1], dim=-1).flatten()
    first = changes.new_full((each.shape[1],), torch.inf)
    order = torch.cat([first, changes]).argsort(descending=True, stable=True)
    chosen = order[:kept].sort().values
    positions = torch.from_numpy(item.tensors["video_positions"].copy()).to(features.device)
    mine = positions[:, chosen].T
    columns = torch.cat([mine // _BASE, mine % _BASE], dim=1).to(features.dtype)
    return torch.cat([features[chosen], columns], dim=1)


def placed(batch: Batch, hidden: int) -> Batch:
    """A batch whose positions are those in the columns after `hidden`, relative to its own."""
    if batch.embeds is None or batch.embeds.shape[1] <= hidden:
        return batch
    columns = batch.embeds[:, hidden:].round().long()
    high, low = columns[:, :3], columns[:, 3:]
    before = batch.axis_positions
    if before is None:
        before = batch.positions.expand(3, -1)
    positions = before + (high * _BASE + low).T
    return evolve(batch, embeds=batch.embeds[:, :hidden], axis_positions=positions)
