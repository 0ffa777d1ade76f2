"""The backend `ipc`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor

from modulm.contracts.loader import StoredTensor
from modulm.errors import RequestError
from modulm_weight_transfer.contract import (
    TensorSource,
    WeightTransferBackend,
    read_tensor_info,
)
from modulm_weights_ipc.handles import CudaIpc

__all__ = ["IpcBackend", "IpcConfig"]


@frozen
class IpcConfig:
    """This backend has no settings."""


class IpcBackend(WeightTransferBackend):
    """Tensors in the memory of the worker's GPU that a trainer on the same host has made."""

    name = "ipc"
    api = 1
    Config = IpcConfig
    #: Access to torch's functions; tests replace it.
    cuda: ClassVar[CudaIpc] = CudaIpc()

    def connect(self, info: Mapping[str, Any]) -> None:
        """Do nothing: each update brings its handles."""

    def open(self, info: Mapping[str, Any]) -> TensorSource:
        return _OpenTensors(info, self.cuda)


class _OpenTensors:
    def __init__(self, info: Mapping[str, Any], cuda: CudaIpc) -> None:
        tensors, handles = read_tensor_info(info), info.get("ipc_handles")
        if "ipc_handles_pickled" in info:
            message = "pickles are not accepted: send ipc_handles, as IpcWeights.info has them"
            raise RequestError(message, "ipc_handles_pickled")
        if not isinstance(handles, list) or len(handles) != len(tensors):
            raise RequestError("must be a list of one handle per name", "ipc_handles")
        uuid = cuda.uuid(cuda.device())
        self._tensors: dict[str, Tensor] = {}
        for (name, dtype, shape), by_gpu in zip(tensors, handles, strict=True):
            kind = getattr(torch, dtype, None)
            if not isinstance(kind, torch.dtype):
                raise RequestError(f"{name}: {dtype!r} is not a dtype", "update_info")
            if not isinstance(by_gpu, Mapping) or uuid not in by_gpu:
                raise RequestError(f"{name} has no handle for this GPU, {uuid}", "ipc_handles")
            tensor = cuda.open(by_gpu[uuid], kind, name)
            if tuple(tensor.shape) != shape:
                message = f"{name}: the handle is of {list(tensor.shape)}, not {list(shape)}"
                raise RequestError(message, "ipc_handles")
            self._tensors[name] = tensor

    def index(self) -> Mapping[str, StoredTensor]:
        return {
            name: StoredTensor(
                name, tuple(t.shape), str(t.dtype).removeprefix("torch."), "the update", t.nbytes
            )
            for name, t in self._tensors.items()
        }

    def read(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._tensors.items()

    def close(self) -> None:
        self._tensors.clear()
