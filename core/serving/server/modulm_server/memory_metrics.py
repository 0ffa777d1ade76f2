"""Metrics of the memory that the engine of a server of one model uses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from modulm.errors import EngineError, UnsupportedError
from modulm_memory.usage import (
    Expected,
    device_bytes,
    expected_bytes,
    measure,
    process_bytes,
    process_tree,
)

if TYPE_CHECKING:
    from prometheus_client import Metric

    from modulm_server.engine.client import EngineClient

__all__ = ["EngineMemory", "memory_metrics"]

#: Seconds that workers have to answer.
_ANSWER = 5.0


def memory_metrics() -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
    """Create the metrics of memory in use, and of memory beyond the estimate."""
    memory = GaugeMetricFamily(
        "modulm:model_memory_bytes", "Memory of a model's processes.", labels=("model_name",)
    )
    beyond = GaugeMetricFamily(
        "modulm:model_memory_beyond_estimate_bytes",
        "Memory of a model's processes beyond what was estimated before it was loaded.",
        labels=("model_name",),
    )
    return memory, beyond


class EngineMemory(Collector):
    """What an engine's processes hold, and how much of it was not expected.

    The workers estimate it once, at the first measurement. There are no metrics of engines without
    processes of their own on this machine.
    """

    def __init__(self, name: str, engine: EngineClient) -> None:
        self._name, self._engine = name, engine
        self._expected: Sequence[Expected] | None = None
        self._sizes: tuple[int, int | None] | None = None

    async def measure(self) -> None:
        """Measure the engine's processes, for the next `collect`."""
        engine = self._engine
        processes = await asyncio.to_thread(lambda: [*process_tree(engine.process_ids)])
        held = await asyncio.to_thread(measure, processes, tree=False)
        if not held:
            return
        on_devices: list[int | None] = []
        with suppress(EngineError, UnsupportedError):  # too busy, asleep, or it has died
            if self._expected is None:
                self._expected = await engine.collective_rpc(expected_bytes, _ANSWER)
            if any(worker.on_device for worker in self._expected):
                on_devices = await engine.collective_rpc(device_bytes, _ANSWER)
        self._sizes = (
            held + sum(size or 0 for size in on_devices),
            self._beyond(processes, on_devices),
        )

    def _beyond(self, processes: Sequence[int], on_devices: Sequence[int | None]) -> int | None:
        """Return the unexpected bytes of all workers; None if that is unknown."""
        workers = self._expected or ()
        if not workers or any(worker.process_id not in processes for worker in workers):
            return None
        beyond = 0
        for index, worker in enumerate(workers):
            if worker.bytes is None or (worker.on_device and not on_devices):
                return None
            held = on_devices[index] if worker.on_device else process_bytes(worker.process_id)
            beyond += max(0, (held or 0) - worker.bytes)
        return beyond

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        if self._sizes is None:
            return
        memory, beyond = memory_metrics()
        memory.add_metric((self._name,), self._sizes[0])
        yield memory
        if self._sizes[1] is not None:
            beyond.add_metric((self._name,), self._sizes[1])
            yield beyond
