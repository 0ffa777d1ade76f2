"""The backend `gloo`."""

from __future__ import annotations

from modulm_weight_transfer.broadcast import BroadcastBackend, BroadcastConfig

__all__ = ["GlooBackend", "GlooConfig"]


class GlooConfig(BroadcastConfig):
    """See `BroadcastConfig`."""


class GlooBackend(BroadcastBackend):
    """Tensors through host memory, between any machines."""

    name = "gloo"
    api = 1
    Config = GlooConfig
    collective = "gloo"
