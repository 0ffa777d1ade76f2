"""The backend `shared_memory`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm_weight_transfer.contract import TensorSource, WeightTransferBackend
from modulm_weights_shared_memory.segment import KeptMapping, SharedTensors, unlink_abandoned

__all__ = ["SharedMemoryBackend", "SharedMemoryConfig"]


@frozen
class SharedMemoryConfig:
    """This backend has no settings."""


class SharedMemoryBackend(WeightTransferBackend):
    """Tensors that a trainer on the same host has put into shared memory."""

    name = "shared_memory"
    api = 1
    Config = SharedMemoryConfig

    def __init__(self, config: Any, rank: int, ranks: int) -> None:
        super().__init__(config, rank, ranks)
        self._kept = KeptMapping()

    def connect(self, info: Mapping[str, Any]) -> None:
        """Free what killed trainers have left behind; each update names its segment."""
        unlink_abandoned()

    def open(self, info: Mapping[str, Any]) -> TensorSource:
        source = SharedTensors(info, self._kept)
        unlink_abandoned()
        return source

    def checked(self, source: TensorSource) -> frozenset[str]:
        return source.checked() if isinstance(source, SharedTensors) else frozenset()

    def close(self) -> None:
        self._kept.release()
        unlink_abandoned()
