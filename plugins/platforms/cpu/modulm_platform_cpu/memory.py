"""Memory of the machine or of the control group this process is in, whichever is less."""

from __future__ import annotations

import ctypes
import mmap
import platform
from pathlib import Path

import torch

from modulm.contracts.platform import Memory

__all__ = ["give_back", "keep_freed_memory", "lazy_zeros", "read_memory"]

#: glibc's mallopt: parameters of malloc.h, and a size above any activation.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30
#: The most that old releases take as the size from which blocks are mapped.
_OLD_MOST = 32 << 20


def keep_freed_memory() -> bool:
    """Lets malloc reuse the pages of large tensors instead of giving them back on every free.

    By default glibc takes blocks above 32 MiB from the system and returns what lies free at the
    heap's end, so each large output faults in its pages anew: measured, a third of the time of a
    linear layer with a 16 MB output. The price is that a process keeps its largest use until
    `give_back`. Returns whether it was set: False where the C library is another than glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    kept: int = mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    mapped: int = mallopt(_MMAP_THRESHOLD, _KEPT_BYTES) or mallopt(_MMAP_THRESHOLD, _OLD_MOST)
    return bool(kept and mapped)


def give_back() -> None:
    """Free pages that malloc has kept go back to the system."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def lazy_zeros(size: int) -> torch.Tensor:
    """[size] zeroed bytes whose pages the system gives when they are first touched.

    Not from malloc, which may hand out memory that was in use and has to be cleared.
    """
    area = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8)[:size]


def read_memory(root: Path = Path("/")) -> Memory:
    """Total and free bytes; `root` is where proc and sys are found (tests put their own there)."""
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
    """(limit, used) of the control groups above this process, versions 2 and 1."""
    found: list[tuple[int, int]] = []
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
                found.append((bound, used - cached))
    return found


def _folders(root: Path, base: Path) -> list[Path]:
    """The process's own control group (version 2) and those above it, up to the root."""
    own = root / "proc/self/cgroup"
    path = ""
    if own.exists():
        lines = [line for line in own.read_text().splitlines() if line.startswith("0::")]
        path = lines[0].removeprefix("0::").strip("/") if lines else ""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [base.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _number(file: Path) -> int | None:
    """The number in a file; None for "max", for nonsense and for no file."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _stat(file: Path, key: str) -> int:
    """Cached file pages that the kernel can drop count as free."""
    try:
        pairs = dict(line.split() for line in file.read_text().splitlines())
        return int(pairs.get(key, 0))
    except (OSError, ValueError):
        return 0
