"""The heap of a server's process: freed memory goes back to the system.

A server frees nearly all that it takes, but in other threads and in another order than it was
taken. glibc gives every thread an arena of its own, up to eight for each processor, and keeps the
pages that lie free between what is in use: what a process holds creeps for as long as a new
coincidence of requests can still happen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

__all__ = ["ARENAS", "bound_arenas", "give_back"]

#: As many as there are threads for texts at most, which are the only ones that take memory at the
#: same time: with four, tokenizing is as fast as with arenas without bound.
ARENAS = 4
#: A parameter of malloc.h.
_ARENA_MAX = -8
#: Who sets one of these knows better.
_OWN = ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")


def bound_arenas(environment: Mapping[str, str]) -> bool:
    """Let all threads share a few arenas; call it before there are threads.

    Returns whether it was set: False if `environment` says otherwise, and for other C libraries.
    """
    if any(environment.get(name) for name in _OWN):
        return False
    library = ctypes.CDLL(None)
    return hasattr(library, "mallopt") and bool(library.mallopt(_ARENA_MAX, ARENAS))


def give_back() -> bool:
    """Return the free pages of all arenas to the system; takes milliseconds.

    Returns whether there was anything to return.
    """
    library = ctypes.CDLL(None)
    return hasattr(library, "malloc_trim") and bool(library.malloc_trim(0))
