"""torch's module for one kind of GPU: `torch.cuda` (NVIDIA, AMD) or `torch.xpu`.

Platforms use this object instead of torch, so that tests can replace it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

__all__ = ["Graph", "Runtime", "Stream"]


class Stream(Protocol):
    """A torch stream: a queue of work on the device."""

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


class Graph(Protocol):
    """A torch graph: captured work."""

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


class Runtime:
    """torch's functions for one kind of GPU.

    kind: torch's device type. module: torch's functions for it.
    """

    def __init__(self, kind: str, module: Any = None) -> None:
        self.kind = kind
        self.module = module if module is not None else torch.get_device_module(kind)

    @property
    def hip(self) -> str | None:
        """The HIP version of this torch build; None for NVIDIA's or Intel's GPUs."""
        return torch.version.hip

    def count(self) -> int:
        """Number of usable GPUs. Raises RuntimeError if the driver is broken."""
        return int(self.module.device_count()) if self.module.is_available() else 0

    @property
    def device(self) -> torch.device:
        """The GPU of this process."""
        return torch.device(self.kind, self.module.current_device())

    def properties(self) -> Any:
        """torch's device properties: name, size, features."""
        return self.module.get_device_properties(self.device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Pinned host memory, for asynchronous copies."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def mapped(self, memory: torch.Tensor) -> torch.Tensor | None:
        """Pinned host memory as a tensor of the device; None if it cannot read host memory.

        With unified addressing (CUDA, ROCm) pinned memory has one address on both sides. Intel's
        GPUs are not asked for it.
        """
        if self.kind != "cuda":
            return None
        storage = torch._C._construct_storage_from_data_pointer(
            memory.data_ptr(), self.device, memory.nbytes
        )
        view = torch.empty(0, dtype=memory.dtype, device=self.device)
        view.set_(storage, 0, memory.size(), memory.stride())
        return view

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes, as reported by the driver."""
        free, total = self.module.mem_get_info(self.device)
        return int(free), int(total)

    def used_by(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep the tensor's memory until the work now queued on `stream` is done."""
        tensor.record_stream(stream)  # type: ignore[arg-type]

    def begin_capture(self, pool: Any) -> Graph:
        """Start capturing what this thread launches on the current stream."""
        if self.kind == "xpu":
            graph = self.module.XPUGraph()
            graph.capture_begin(pool=pool)
        else:
            graph = self.module.CUDAGraph()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        return graph  # type: ignore[no-any-return]

    def end_capture(self, graph: Graph, failed: bool) -> Callable[[], None] | None:
        """Return a function that replays the work, None after a failure.

        A failure has either ended the capture already or makes ending it fail as well.
        """
        if failed:
            with suppress(RuntimeError):
                graph.capture_end()
            return None
        graph.capture_end()
        return graph.replay

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of the tensor that does not keep its memory from being reused."""
        storage = torch._C._construct_storage_from_data_pointer(
            tensor.untyped_storage().data_ptr(), tensor.device, tensor.untyped_storage().nbytes()
        )
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        return view
