"""The backend `nccl`."""

from __future__ import annotations

from modulm_weight_transfer.broadcast import BroadcastBackend, BroadcastConfig

__all__ = ["NcclBackend", "NcclConfig"]


class NcclConfig(BroadcastConfig):
    """See `BroadcastConfig`."""


class NcclBackend(BroadcastBackend):
    """Tensors from GPU to GPU. The trainer's GPU must be another one than the workers'."""

    name = "nccl"
    api = 1
    Config = NcclConfig
    collective = "nccl"
