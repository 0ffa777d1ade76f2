"""The part of torch that drives one kind of GPU: `torch.cuda` (NVIDIA, AMD) or `torch.xpu`.

Platforms ask this object and not torch, so that a test gives them another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

__all__ = ["Graph", "Runtime", "Stream"]


class Stream(Protocol):
    """A queue of work on the device, as torch has it."""

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


class Graph(Protocol):
    """Work that was captured, as torch has it."""

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


class Runtime:
    """What is asked of torch about GPUs of one kind.

    kind: of torch's devices. module: functions of torch for it, by torch's names.
    """

    def __init__(self, kind: str, module: Any = None) -> None:
        self.kind = kind
        self.module = module if module is not None else torch.get_device_module(kind)

    @property
    def hip(self) -> str | None:
        """The version of HIP that this torch was built for; None: for NVIDIA's or Intel's GPUs."""
        return torch.version.hip

    def count(self) -> int:
        """GPUs that can be used. Raises RuntimeError where a driver is there and does not work."""
        return int(self.module.device_count()) if self.module.is_available() else 0

    @property
    def device(self) -> torch.device:
        """The GPU of this process."""
        return torch.device(self.kind, self.module.current_device())

    def properties(self) -> Any:
        """Name, size and features of the GPU, as torch calls them."""
        return self.module.get_device_properties(self.device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device copies from and to while the host goes on."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes, as the driver counts."""
        free, total = self.module.mem_get_info(self.device)
        return int(free), int(total)

    def used_by(self, tensor: torch.Tensor, stream: Stream) -> None:
        """The tensor's memory is not another's before what is now queued there is done."""
        tensor.record_stream(stream)  # type: ignore[arg-type]

    def begin_capture(self, pool: Any) -> Graph:
        """Work that this thread launches on the current stream is written down from here on."""
        if self.kind == "xpu":
            graph = self.module.XPUGraph()
            graph.capture_begin(pool=pool)
        else:
            graph = self.module.CUDAGraph()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        return graph  # type: ignore[no-any-return]

    def end_capture(self, graph: Graph, failed: bool) -> Callable[[], None] | None:
        """What does the work again; None after a failure, which has ended the capture already or
        makes ending it fail as well.
        """
        if failed:
            with suppress(RuntimeError):
                graph.capture_end()
            return None
        graph.capture_end()
        return graph.replay

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same place, without keeping its memory from being used again."""
        storage = torch._C._construct_storage_from_data_pointer(
            tensor.untyped_storage().data_ptr(), tensor.device, tensor.untyped_storage().nbytes()
        )
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        made.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        return made
