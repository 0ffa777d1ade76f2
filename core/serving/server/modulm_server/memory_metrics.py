"""Metrics of the memory that the engine of a server of one model uses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from modulm.errors import ModulmError
from modulm_memory.usage import PENDING, device_bytes, expected_bytes, measure_each

if TYPE_CHECKING:
    from prometheus_client import Metric

    from modulm_server.engine.client import EngineClient

__all__ = ["EngineMemory", "memory_metrics"]

#: Seconds that workers have to answer.
_ANSWER = 2.0


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

    The workers estimate it once, after the first measurement. There are no metrics of engines
    without processes of their own that this process started.
    """

    def __init__(self, name: str, engine: EngineClient) -> None:
        self._name, self._engine = name, engine
        #: By worker: process id, expected bytes, whether they are on a device.
        self._expected: Sequence[Sequence[Any]] = ()
        self._known = False
        self._memory = 0
        self._beyond: int | None = None

    async def measure(self) -> None:
        """Measure the engine's processes, for the next `collect`."""
        engine = self._engine
        if not engine.process_ids:
            return
        held = await asyncio.to_thread(measure_each, engine.process_ids)
        on_devices: Sequence[int | None] = ()
        with suppress(ModulmError):  # too busy, asleep, or it has died
            if not self._known:
                self._expected = await engine.collective_rpc(expected_bytes, _ANSWER)
                self._known = all(expected != PENDING for _, expected, _ in self._expected)
            if any(on_device for _, _, on_device in self._expected):
                on_devices = await engine.collective_rpc(device_bytes, _ANSWER)
        self._memory = sum(held.values()) + sum(size or 0 for size in on_devices)
        self._beyond = self._beyond_estimate(held, on_devices)

    def _beyond_estimate(
        self, held: Mapping[int, int], on_devices: Sequence[int | None]
    ) -> int | None:
        """Return the unexpected bytes of all workers; None if they are unknown."""
        beyond = 0
        for index, (process, expected, on_device) in enumerate(self._expected):
            if on_device:
                used = on_devices[index] if index < len(on_devices) else None
            else:
                used = held.get(process)
            if not self._known or expected is None or used is None:
                return None
            beyond += max(0, used - expected)
        return beyond if self._expected else None

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        memory, beyond = memory_metrics()
        if self._memory:
            memory.add_metric((self._name,), self._memory)
            yield memory
        if self._beyond is not None:
            beyond.add_metric((self._name,), self._beyond)
            yield beyond
