"""Measure what this machine can do, in a second or two, as the reference for `bench/`."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from modulm_kernels_cpu.library import Library
from modulm_kernels_cpu.memory import huge_buffer

__all__ = ["RATES", "ReadProbe", "instruction_rates", "read_bandwidth"]

#: Instructions whose rate is measured, in the library's order.
RATES = ("fma", "vdpbf16ps", "vpdpbusd", "tdpbf16ps", "tdpbssd", "vpermw")

_PASSES = 5


class ReadProbe:
    """A buffer of `size` bytes that all threads read, once per call of `rate`."""

    def __init__(self, library: Library, size: int = 1 << 29) -> None:
        self._call = library.call("probe_read", "pn", ctypes.c_double)
        self._buffer = huge_buffer(size)
        self._buffer.fill_(1)

    def rate(self) -> float:
        """Return the GB/s of one pass."""
        return float(self._call(self._buffer.data_ptr(), self._buffer.numel()))


def read_bandwidth(library: Library, size: int = 1 << 29) -> float:
    """Return the GB/s of reading `size` bytes with all threads, the best of several passes."""
    probe = ReadProbe(library, size)
    return max(probe.rate() for _ in range(_PASSES))


def instruction_rates(library: Library) -> Mapping[str, float]:
    """Return 1e9 multiplications (vpermw: lanes) per second on all threads, by instruction."""
    call = library.call("probe_rate", "i", ctypes.c_double)
    rates = {name: max(call(kind) for _ in range(3)) for kind, name in enumerate(RATES)}
    return {name: value for name, value in rates.items() if value}
