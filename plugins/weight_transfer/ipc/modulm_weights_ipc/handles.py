"""Handles of tensors in GPU memory, as JSON data (`torch.multiprocessing.reductions`)."""

from __future__ import annotations

import inspect
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions
from torch.storage import TypedStorage

from modulm.errors import RequestError

__all__ = ["CudaIpc", "IpcWeights"]

#: Arguments of `rebuild_cuda_tensor` that a handle has, and those that the receiver knows.
_BYTES = ("storage_handle", "ref_counter_handle", "event_handle")
_SIZES = (
    "tensor_offset", "storage_size_bytes", "storage_offset_bytes", "ref_counter_offset",
)  # fmt: skip
_LISTS = ("tensor_size", "tensor_stride")


class CudaIpc:
    """torch's functions for memory that processes share on a GPU; tests replace them."""

    reduce: Callable[[Tensor], tuple[Any, tuple[Any, ...]]] = staticmethod(reductions.reduce_tensor)
    rebuild: Callable[..., Tensor] = staticmethod(reductions.rebuild_cuda_tensor)

    def device(self) -> int:
        """Return the index of this process's GPU."""
        return torch.accelerator.current_device_index()

    def uuid(self, device: int) -> str:
        """Return the identity of a GPU, which all processes see alike."""
        return str(torch.get_device_module().get_device_properties(device).uuid)

    def share(self, tensor: Tensor) -> dict[str, Any]:
        """Return the handle of a tensor. Raises ValueError if it is not on a GPU."""
        function, arguments = self.reduce(tensor.detach())
        if function is not reductions.rebuild_cuda_tensor:
            raise ValueError(f"a tensor on {tensor.device}: only GPU memory can be shared")
        names = inspect.signature(reductions.rebuild_cuda_tensor).parameters
        values = dict(zip(names, arguments, strict=True))
        handle: dict[str, Any] = {name: values[name] for name in _SIZES}
        handle |= {name: list(values[name]) for name in _LISTS}
        handle |= {name: b64encode(values[name] or b"").decode() for name in _BYTES}
        return {**handle, "event_sync_required": bool(values["event_sync_required"])}

    def open(self, handle: Mapping[str, Any], dtype: torch.dtype, name: str) -> Tensor:
        """Open a tensor of another process. Raises RequestError for an invalid handle."""
        try:
            values: dict[str, Any] = {key: int(handle[key]) for key in _SIZES}
            values |= {key: tuple(map(int, handle[key])) for key in _LISTS}
            values |= {key: b64decode(handle[key], validate=True) or None for key in _BYTES}
            return self.rebuild(
                tensor_cls=Tensor,
                storage_cls=TypedStorage,
                dtype=dtype,
                storage_device=self.device(),
                requires_grad=False,
                event_sync_required=bool(handle["event_sync_required"]),
                **values,
            )
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            message = f"{name}: the handle cannot be opened: {error}"
            raise RequestError(message, "ipc_handles") from error


class IpcWeights:
    """The trainer's side: tensors of its GPU that engines on the same host read.

    They must stay as they are until `finish_weight_update` has returned, and this object must be
    kept as long. Raises ValueError for a tensor that is not on a GPU.
    """

    def __init__(self, tensors: Mapping[str, Tensor], cuda: CudaIpc | None = None) -> None:
        cuda = cuda or CudaIpc()
        self._tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        uuid = cuda.uuid(cuda.device())
        #: The `update_info` of `update_weights`.
        self.info: dict[str, Any] = {
            "names": list(tensors),
            "dtype_names": [
                str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()
            ],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "ipc_handles": [{uuid: cuda.share(tensor)} for tensor in self._tensors.values()],
        }
