"""How a kernel is started: on the device, or only compiled for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["compiling_only", "cut", "launch", "power_of_two"]

_compiled: list[Any] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """`kernel[grid](*args, **meta)`, if the grid holds a program at all."""
    if 0 in grid:
        return
    if _compiled is None:
        kernel[grid](*args, **meta)
    else:
        _compiled.append(kernel.warmup(*args, grid=grid, **meta))


@contextmanager
def compiling_only() -> Iterator[list[Any]]:
    """Inside, kernels are compiled as their calls would have them and not started.

    Gives the list that the compiled kernels are put into.
    """
    global _compiled
    before, _compiled = _compiled, []
    try:
        yield _compiled
    finally:
        _compiled = before


def power_of_two(size: int) -> int:
    """The least power of two from `size` on; blocks of a kernel are as long as these."""
    return 1 << max(size - 1, 0).bit_length()


def cut(size: int, block: int) -> int:
    """How many blocks hold `size`."""
    return -(-size // block)
