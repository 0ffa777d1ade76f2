"""Memory of engines: measured for those that run, estimated for those that do not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["estimate", "measure"]

_PROC = Path("/proc")
#: Endings of files that are weights.
_WEIGHTS = frozenset({".safetensors", ".gguf", ".bin", ".pt", ".pth"})


def estimate(checkpoint: Path) -> int:
    """Estimate the memory of a model before it is loaded, from the sizes of its weights.

    checkpoint: a folder, or one file. After a model was loaded, its measured memory is better.
    """
    files = [checkpoint] if checkpoint.is_file() else checkpoint.rglob("*")
    weights = [file for file in files if file.suffix in _WEIGHTS and file.is_file()]
    tensors = [file for file in weights if file.suffix == ".safetensors"]
    return sum(file.stat().st_size for file in tensors or weights)


def measure(process_ids: Iterable[int]) -> int:
    """The memory of processes and of those that they started, in bytes: pages that several
    processes share count proportionally. 0 on systems without /proc.
    """
    return sum(_proportional(process) for process in _tree(process_ids))


def _tree(process_ids: Iterable[int]) -> Iterator[int]:
    waiting = list(process_ids)
    while waiting:
        process = waiting.pop()
        yield process
        with suppress(OSError):
            for task in (_PROC / str(process) / "task").iterdir():
                children = (task / "children").read_text(encoding="ascii").split()
                waiting += map(int, children)


def _proportional(process: int) -> int:
    folder = _PROC / str(process)
    with suppress(OSError):
        for line in (folder / "smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0
