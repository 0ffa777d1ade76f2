"""Start a kernel on the device, or only compile it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["compiling_only", "cut", "launch", "power_of_two"]

_compiled: list[Any] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Call `kernel[grid](*args, **meta)`, unless the grid is empty."""
    if 0 in grid:
        return
    if _compiled is None:
        kernel[grid](*args, **meta)
    else:
        _compiled.append(kernel.warmup(*args, grid=grid, **meta))


@contextmanager
def compiling_only() -> Iterator[list[Any]]:
    """Compile kernels for their calls, inside the context, without starting them.

    Yields the list of compiled kernels.
    """
    global _compiled
    before, _compiled = _compiled, []
    try:
        yield _compiled
    finally:
        _compiled = before


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`; kernel blocks have such sizes."""
    return 1 << max(size - 1, 0).bit_length()


def cut(size: int, block: int) -> int:
    """Return the number of blocks that cover `size`."""
    return -(-size // block)
