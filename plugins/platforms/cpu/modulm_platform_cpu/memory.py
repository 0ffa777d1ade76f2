"""Memory of the machine or of this process's control group, whichever is less."""

from __future__ import annotations

import ctypes
import mmap
import platform
from pathlib import Path

import torch

from modulm.contracts.platform import Memory
from modulm_platform_cpu.ahead import keep_ahead

__all__ = ["give_back", "keep_freed_memory", "lazy_zeros", "read_memory"]

#: glibc's mallopt: parameters of malloc.h, and a size above any activation.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30
#: Largest mmap threshold that old releases of glibc accept.
_OLD_MOST = 32 << 20


def keep_freed_memory() -> bool:
    """Let malloc reuse the pages of large tensors instead of returning them on every free.

    By default, glibc maps blocks above 32 MiB and trims free memory at the end of the heap, so each
    large output faults its pages in again: a third of the time of a linear layer with a 16 MB
    output, measured. The cost is that the process keeps its peak memory until `give_back`.

    Returns whether it was set; False if the C library is not glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    trim: int = mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    mmap: int = mallopt(_MMAP_THRESHOLD, _KEPT_BYTES) or mallopt(_MMAP_THRESHOLD, _OLD_MOST)
    return bool(trim and mmap)


def give_back() -> None:
    """Return free pages that malloc holds to the system."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def lazy_zeros(size: int) -> torch.Tensor:
    """Return [size] zeroed bytes whose pages the system provides when they are first touched.

    They do not come from malloc, which could return used memory that has to be cleared. Of large
    areas a thread provides the next pages before that (`ahead`).
    """
    area = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(area, dtype=torch.uint8)[:size]
    keep_ahead(area, memory.data_ptr(), size)
    return memory


def read_memory(root: Path = Path("/")) -> Memory:
    """Read total and available bytes. root: the folder with proc and sys, replaced in tests."""
    total, free = _meminfo(root / "proc/meminfo")
    for limit, used in _limits(root):
        total = min(total, limit)
        free = min(free, max(limit - used, 0))
    return Memory(total=total, free=free)


def _meminfo(file: Path) -> tuple[int, int]:
    table = {}
    for line in file.read_text().splitlines():
        key, _, value = line.partition(":")
        table[key] = int(value.split()[0]) * 1024
    return table["MemTotal"], table["MemAvailable"]


def _limits(root: Path) -> list[tuple[int, int]]:
    """Return (limit, used) of the control groups above this process, versions 2 and 1."""
    limits: list[tuple[int, int]] = []
    base = root / "sys/fs/cgroup"
    for limit, usage, reclaimable in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in _folders(root, base):
            bound = _number(folder / limit)
            used = _number(folder / usage)
            if bound is not None and used is not None:
                cached = _stat((folder / limit).parent / "memory.stat", reclaimable)
                limits.append((bound, used - cached))
    return limits


def _folders(root: Path, base: Path) -> list[Path]:
    """Return the process's control group (version 2) and its parents up to the root."""
    membership = root / "proc/self/cgroup"
    path = ""
    if membership.exists():
        lines = [line for line in membership.read_text().splitlines() if line.startswith("0::")]
        path = lines[0].removeprefix("0::").strip("/") if lines else ""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [base.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _number(file: Path) -> int | None:
    """Read the number in a file; None for "max", invalid text or a missing file."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _stat(file: Path, key: str) -> int:
    """Read a counter; cached file pages that the kernel can drop count as free."""
    try:
        pairs = dict(line.split() for line in file.read_text().splitlines())
        return int(pairs.get(key, 0))
    except (OSError, ValueError):
        return 0
