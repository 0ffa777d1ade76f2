"""Looks for TPUs. Imports neither torch nor JAX: every process asks when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from modulm.config.environ import variables
from modulm.errors import ConfigError

__all__ = ["chip_memory", "chips_of", "look"]

_PCI, _GOOGLE = Path("/sys/bus/pci/devices"), "0x1ae0"
#: PCI device -> GiB of memory of each device that JAX shows: TPU v3, v4, v5p, v5e, v6e and 7x.
_MEMORY = {"0x0027": 16, "0x005e": 32, "0x0062": 95, "0x0063": 16, "0x006f": 32, "0x0076": 96}

#: Kinds whose chips JAX shows as two devices each: TPU v3 and 7x.
_PAIRS = ("0x0027", "0x0076")
#: Chips of a process -> their arrangement on the host's board.
_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
_FIRST_PORT = 8476


def chip_memory(pci: Path = _PCI) -> int:
    """Return the bytes of a TPU device of this machine, 0 if it has none of a known kind.

    A process that asked JAX instead would keep the chips from others.
    """
    return _MEMORY.get(_kind(pci), 0) << 30


def chips_of(first: int, count: int, pci: Path = _PCI) -> Mapping[str, str]:
    """Return the variables with which libtpu uses `count` devices from `first` on, and no others.

    Raises ConfigError for devices that are no whole chips, or a number that has no arrangement.
    """
    each = 2 if _kind(pci) in _PAIRS else 1
    chips, at = count // each, first // each
    if count % each or first % each or chips not in _BOUNDS or at % chips:
        sizes = ", ".join(str(size * each) for size in _BOUNDS)
        message = f"{count} devices from {first} on; replicas on a TPU host have {sizes} devices"
        raise ConfigError("tensor_parallel_size", message)
    port = str(_FIRST_PORT + at)
    return {
        "TPU_VISIBLE_CHIPS": ",".join(map(str, range(at, at + chips))),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": _BOUNDS[chips],
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
        "TPU_PROCESS_PORT": port,
        "CLOUD_TPU_TASK_ID": "0",
    }


def _kind(pci: Path) -> str:
    """Return the PCI device id of this machine's TPUs of a known kind, "" without."""
    for vendor in pci.glob("*/vendor"):
        if vendor.read_text().strip() == _GOOGLE:
            kind = vendor.with_name("device").read_text().strip()
            if kind in _MEMORY:
                return kind
    return ""


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
