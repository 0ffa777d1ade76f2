"""Attention with the sines of distances (Transformer-XL, arXiv 1901.02860), as conformers use."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["distance_scores", "distance_sines"]


def distance_sines(count: int, width: int) -> Tensor:
    """[2 * count - 1, width] float32: sines and cosines in turn, of count - 1 down to 1 - count."""
    at = torch.arange(count - 1, -count, -1, dtype=torch.float32)
    waves = torch.exp(torch.arange(0, width, 2).float() * (-math.log(10000.0) / width))
    angles = at[:, None] * waves
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def distance_scores(queries: Tensor, distances: Tensor) -> Tensor:
    """[heads, count, count]: products of each query with the distance to each key.

    queries: [heads, count, head_dim]; distances: [heads, 2 * count - 1, head_dim], from the largest
    to the smallest.
    """
    count = queries.shape[1]
    products = queries @ distances.transpose(1, 2)
    at = torch.arange(count, device=queries.device)
    index = count - 1 - at[:, None] + at
    return products.gather(2, index.expand(len(products), -1, -1))
