"""The backend `gloo`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen, validators

from modulm.errors import RequestError
from modulm_weight_transfer.broadcast import ReceivedTensors, open_group
from modulm_weight_transfer.contract import TensorSource, WeightTransferBackend

__all__ = ["GlooBackend", "GlooConfig"]


@frozen
class GlooConfig:
    """timeout: seconds to wait for the trainer, and for each tensor."""

    timeout: float = field(default=300.0, validator=validators.gt(0))


class GlooBackend(WeightTransferBackend):
    """Tensors that a trainer broadcasts, in the open: for networks that are trusted."""

    name = "gloo"
    api = 1
    Config = GlooConfig
    streams = True

    _group: Any = None

    def connect(self, info: Mapping[str, Any]) -> None:
        """Join the trainer's group. info: vLLM's `master_address`, `master_port`, `rank_offset` and
        `world_size`.
        """
        kinds = {"master_address": str, "master_port": int, "rank_offset": int, "world_size": int}
        for key, kind in kinds.items():
            if type(info.get(key)) is not kind:
                raise RequestError(f"{key} is required in init_info", key)
        first, size = info["rank_offset"], info["world_size"]
        if first < 1 or first + self.ranks > size:
            message = f"{size} has no room for a trainer and {self.ranks} workers from {first} on"
            raise RequestError(message, "world_size")
        self._group = open_group(
            info["master_address"],
            info["master_port"],
            first + self.rank,
            size,
            self.config.timeout,
        )

    def open(self, info: Mapping[str, Any]) -> TensorSource:
        return ReceivedTensors(self._group, info)

    def close(self) -> None:
        self._group = None
