"""The backend `shared_memory`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm_weight_transfer.contract import TensorSource, WeightTransferBackend
from modulm_weights_shared_memory.segment import SharedTensors

__all__ = ["SharedMemoryBackend", "SharedMemoryConfig"]


@frozen
class SharedMemoryConfig:
    """This backend has no settings."""


class SharedMemoryBackend(WeightTransferBackend):
    """Tensors that a trainer on the same host has put into shared memory."""

    name = "shared_memory"
    api = 1
    Config = SharedMemoryConfig

    def connect(self, info: Mapping[str, Any]) -> None:
        """Do nothing: each update names its segment."""

    def open(self, info: Mapping[str, Any]) -> TensorSource:
        return SharedTensors(info)
