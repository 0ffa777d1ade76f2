"""A fake GPU driver: torch's device functions, on host memory.

    class Fake(CudaPlatform):
        runtime = FakeRuntime("cuda", FakeDriver(name="NVIDIA H200", major=9))

Work runs immediately; calls to the driver are logged in `calls`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from modulm_gpu.runtime import Runtime, Stream

__all__ = ["FakeDriver", "FakeRuntime"]


class _Stream:
    def __init__(self, driver: FakeDriver, name: str) -> None:
        self._driver, self.name = driver, name

    def wait_event(self, event: Any) -> None:
        self._driver.calls.append(f"{self.name} waits for {event.name}")

    def wait_stream(self, stream: Any) -> None:
        self._driver.calls.append(f"{self.name} waits for {stream.name}")


class _Event:
    def __init__(self, driver: FakeDriver) -> None:
        self._driver, self.name = driver, "an event that was never recorded"

    def record(self) -> None:
        self.name = f"an event of {self._driver.current.name}"
        self._driver.calls.append(f"{self._driver.current.name} records")

    def synchronize(self) -> None:
        self._driver.calls.append("host waits")


class _Graph:
    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver

    def capture_begin(self, pool: Any = None, **mode: Any) -> None:
        if self._driver.current.name == "default":
            raise RuntimeError("graphs must be captured on a stream that is not the default one")
        self._driver.calls.append(f"capture into {pool} {mode}".strip())
        self._driver.capturing = True

    def capture_end(self) -> None:
        self._driver.capturing = False
        self._driver.used += self._driver.graph_bytes
        self._driver.calls.append("capture ends")

    def replay(self) -> None:
        self._driver.calls.append("replay")


class FakeDriver:
    """Stands in for `torch.cuda` and `torch.xpu`.

    count: number of GPUs. properties: device properties by torch's names. used: bytes in use.
    graph_bytes: memory of a captured graph.
    """

    total = 64 << 30
    graph_bytes = 1 << 20

    def __init__(self, count: int = 1, **properties: Any) -> None:
        self.count = count
        self.device_properties = SimpleNamespace(**{"total_memory": self.total, **properties})
        self.calls: list[str] = []
        self.default = self.current = _Stream(self, "default")
        self.capturing = False
        self.device = 0
        self.used = self.allocated = self.peak = 0
        self._streams = self._pools = 0

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def current_device(self) -> int:
        return self.device

    def set_device(self, device: Any) -> None:
        self.calls.append(f"device {device}")
        self.device = device if isinstance(device, int) else device.index

    def get_device_properties(self, device: Any) -> Any:
        return self.device_properties

    def is_bf16_supported(self) -> bool:
        return True

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return self.total - self.used, self.total

    def memory_reserved(self, device: Any) -> int:
        return self.used

    def memory_allocated(self, device: Any) -> int:
        return self.allocated

    def reset_peak_memory_stats(self, device: Any) -> None:
        self.peak = self.allocated

    def max_memory_allocated(self, device: Any) -> int:
        return self.peak

    def synchronize(self, device: Any = None) -> None:
        if self.capturing:
            raise RuntimeError("the host synchronizes while a graph is captured")
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def graph_pool_handle(self) -> str:
        self._pools += 1
        return f"pool {self._pools}"

    def Stream(self) -> _Stream:  # noqa: N802
        """A new one."""
        self._streams += 1
        return _Stream(self, f"stream {self._streams}")

    def Event(self) -> _Event:  # noqa: N802
        """A new one."""
        return _Event(self)

    def CUDAGraph(self) -> _Graph:  # noqa: N802
        """A new one."""
        return _Graph(self)

    XPUGraph = CUDAGraph

    def current_stream(self) -> _Stream:
        return self.current

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        """Launch work on the stream within the block."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class FakeRuntime(Runtime):
    """A runtime on a fake driver; tensors are in host memory."""

    def __init__(self, kind: str, driver: FakeDriver, hip: str | None = None) -> None:
        super().__init__(kind, driver)
        self._hip = hip

    @property
    def hip(self) -> str | None:
        return self._hip

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if self.module.capturing:
            raise RuntimeError("host memory is allocated while a graph is captured")
        return torch.empty(tuple(shape), dtype=dtype)

    def used_by(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.module.calls.append(f"used by {stream.name}")  # type: ignore[attr-defined]
