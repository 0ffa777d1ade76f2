"""Broadcasts tensors from a trainer (rank 0) to the workers of engines, with gloo or NCCL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from math import prod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from attrs import field, frozen, validators
from torch import Tensor

from modulm.contracts.loader import StoredTensor
from modulm.errors import EngineError, RequestError
from modulm_weight_transfer.contract import (
    TensorSource,
    WeightTransferBackend,
    read_tensor_info,
)

__all__ = [
    "BroadcastBackend", "BroadcastConfig", "ReceivedTensors", "WeightBroadcaster", "open_group",
]  # fmt: skip


def open_group(
    address: str, port: int, rank: int, size: int, seconds: float, collective: str = "gloo"
) -> Any:
    """Create the group of a trainer (rank 0) and workers, waiting for all.

    collective: gloo (tensors in host memory) or nccl (on the current GPU). Raises EngineError.
    """
    limit = timedelta(seconds=seconds)
    # torch defines these, and exports none of them.
    classes: Any = dist
    if collective == "nccl" and not dist.is_nccl_available():
        raise EngineError("this build of torch has no NCCL: use the backend gloo")
    try:
        store = classes.TCPStore(address, port, size, rank == 0, timeout=limit)
        if collective == "nccl":
            options = classes.ProcessGroupNCCL.Options()
            options._timeout = limit
            return classes.ProcessGroupNCCL(store, rank, size, options)
        return classes.ProcessGroupGloo(store, rank, size, limit)
    except (RuntimeError, dist.DistError) as error:
        raise EngineError(f"cannot connect to the trainer at {address}:{port}: {error}") from error


def _device(collective: str) -> torch.device:
    """Return where a collective takes its tensors from."""
    if collective == "nccl" and (kind := torch.accelerator.current_accelerator()) is not None:
        return torch.device(kind.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def _send(group: Any, data: Tensor) -> None:
    """Broadcast bytes from rank 0."""
    if data.numel():
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        group.broadcast([data], options).wait()


class WeightBroadcaster:
    """The trainer's side. workers: total number of workers of all engines.

    `connect` waits for all workers, so call `init_weight_transfer_engine` with `init_info` in
    another thread first; likewise `update_weights` with `info(tensors)` before `send`. collective:
    of the engines' backend, gloo or nccl (with the trainer on a GPU that no worker uses).
    """

    def __init__(
        self,
        address: str,
        port: int,
        workers: int = 1,
        *,
        timeout: float = 300.0,
        collective: str = "gloo",
    ) -> None:
        self._address, self._port, self._size = address, port, workers + 1
        self._timeout, self._collective = timeout, collective
        self._group: Any = None
        #: The `init_info` of `init_weight_transfer_engine`.
        self.init_info: dict[str, Any] = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": self._size,
        }

    def connect(self) -> None:
        """Connect to the workers."""
        self._group = open_group(
            self._address, self._port, 0, self._size, self._timeout, self._collective
        )

    @staticmethod
    def info(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Describe tensors as the `update_info` of `update_weights`.

        Raises ValueError for non-finite values, as an engine that has begun to receive cannot roll
        back.
        """
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise ValueError(f"{name} has values that are not finite")
        return {
            "names": list(tensors),
            "dtype_names": [str(tensor.dtype)[6:] for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send the tensors that `info` has described, in the same order."""
        if self._group is None:
            raise RuntimeError("connect first")
        device = _device(self._collective)
        for tensor in tensors.values():
            data = tensor.detach().to(device).contiguous().view(-1)
            _send(self._group, data.view(torch.uint8))

    def close(self) -> None:
        """Disconnect from the workers."""
        self._group = None


class ReceivedTensors:
    """Yields tensors as they are received, on `device`."""

    def __init__(
        self, group: Any, info: Mapping[str, Any], device: torch.device | None = None
    ) -> None:
        self._group, self._tensors, self._device = group, read_tensor_info(info), device
        for name, dtype, _ in self._tensors:
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise RequestError(f"{name}: {dtype!r} is not a dtype", "update_info")

    def index(self) -> Mapping[str, StoredTensor]:
        return {
            name: StoredTensor(
                name, shape, dtype, "the update", prod(shape) * getattr(torch, dtype).itemsize
            )
            for name, dtype, shape in self._tensors
        }

    def read(self) -> Iterator[tuple[str, Tensor]]:
        for name, dtype, shape in self._tensors:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            try:
                _send(self._group, tensor.view(-1).view(torch.uint8))
            except RuntimeError as error:
                raise EngineError(f"{name} was not received from the trainer: {error}") from error
            yield name, tensor

    def close(self) -> None:
        """Do nothing: tensors are not kept."""


@frozen
class BroadcastConfig:
    """timeout: seconds to wait for the trainer, and for each tensor."""

    timeout: float = field(default=300.0, validator=validators.gt(0))


class BroadcastBackend(WeightTransferBackend):
    """Tensors that a trainer broadcasts, in the open: for networks that are trusted.

    collective: gloo or nccl.
    """

    collective: ClassVar[str]
    Config = BroadcastConfig
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
            self.collective,
        )

    def open(self, info: Mapping[str, Any]) -> TensorSource:
        return ReceivedTensors(self._group, info, _device(self.collective))

    def close(self) -> None:
        self._group = None
