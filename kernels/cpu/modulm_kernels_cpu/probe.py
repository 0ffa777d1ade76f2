"""What this machine can do, measured in a second or two: the yardstick of `bench/`."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from modulm_kernels_cpu.library import Library
from modulm_kernels_cpu.memory import huge_buffer

__all__ = ["RATES", "instruction_rates", "read_bandwidth"]

#: Instructions whose rate is measured, by the number the library knows them by.
RATES = ("fma", "vdpbf16ps", "vpdpbusd", "tdpbf16ps", "tdpbssd", "vpermw")

_PASSES = 5


def read_bandwidth(library: Library, size: int = 1 << 29) -> float:
    """GB/s of reading `size` bytes with all threads, the best of some passes."""
    call = library.call("probe_read", "pn", ctypes.c_double)
    buffer = huge_buffer(size)
    buffer.fill_(1)
    return max(call(buffer.data_ptr(), size) for _ in range(_PASSES))


def instruction_rates(library: Library) -> Mapping[str, float]:
    """1e9 multiplications (vpermw: lanes) per second on all threads, of what the level has."""
    call = library.call("probe_rate", "i", ctypes.c_double)
    found = {name: max(call(kind) for _ in range(3)) for kind, name in enumerate(RATES)}
    return {name: value for name, value in found.items() if value}
