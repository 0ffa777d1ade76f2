"""Looks for TPUs. Imports neither torch nor JAX: every process asks when it starts."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from modulm.config.environ import variables

__all__ = ["chip_memory", "look"]

_PCI, _GOOGLE = Path("/sys/bus/pci/devices"), "0x1ae0"
#: PCI device -> GiB of memory of each device that JAX shows: TPU v3, v4, v5p, v5e, v6e and 7x.
_MEMORY = {"0x0027": 16, "0x005e": 32, "0x0062": 95, "0x0063": 16, "0x006f": 32, "0x0076": 96}


def chip_memory(pci: Path = _PCI) -> int:
    """Return the bytes of a TPU device of this machine, 0 if it has none of a known kind.

    A process that asked JAX instead would keep the chips from others.
    """
    for vendor in pci.glob("*/vendor"):
        if vendor.read_text().strip() == _GOOGLE:
            kind = vendor.with_name("device").read_text().strip()
            if kind in _MEMORY:
                return _MEMORY[kind] << 30
    return 0


def look() -> tuple[int, str]:
    """Return the platform's score, see `Probe`, and the reason."""
    on_cpu = variables().get("JAX_PLATFORMS") == "cpu"
    found = any(Path("/dev").glob("accel*")) or (Path("/dev/vfio").exists() and chip_memory() > 0)
    if not on_cpu and not found:
        return 0, "this machine has no TPU"
    if find_spec("jax") is None or find_spec("torchax") is None:
        return 0, "JAX or torchax is not installed"
    if on_cpu:
        return 1, "JAX_PLATFORMS=cpu: JAX computes on processors"
    if find_spec("libtpu") is None:
        return 0, "libtpu is not installed"
    return 100, "there are TPU devices and libtpu"
