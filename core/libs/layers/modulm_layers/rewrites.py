"""Rewrites of stored weights (`modulm.nn.Rewrite`) that several families need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from modulm.contracts.weight_names import Change

__all__ = ["flatten", "split_heads", "transpose"]


def flatten(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Flatten a weight to one axis."""
    yield name, tensor.flatten()


def transpose(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Transpose a weight that is stored as [..., inputs, outputs]."""
    yield name, tensor.transpose(-1, -2)


def split_heads(heads: int, kv_heads: int) -> Change:
    """Split q, k and v that are stored head by head into all of q, all of k, all of v.

    For each key head the file holds its query heads, the key head and its value head: rows of
    [kv_heads, heads / kv_heads + 2, head_dim].
    """
    each = heads // kv_heads + 2

    def change(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        grouped = tensor.reshape(kv_heads, each, -1, *tensor.shape[1:])
        parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
        yield name, torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])

    return change
