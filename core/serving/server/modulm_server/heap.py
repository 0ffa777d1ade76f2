"""Settings of a server process: the heap, whose freed memory is returned to the system, and how its
threads share the interpreter.

A server frees nearly all memory that it allocates, but in other threads and in another order.
glibc gives every thread its own arena, up to eight per processor, and keeps free pages between used
ones. Without limits, the memory of the process grows slowly for a long time.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping

__all__ = ["ARENAS", "bound_arenas", "give_back", "share_interpreter"]

#: The maximum number of text threads, which are the only ones that allocate concurrently: with
#: four arenas, tokenizing is as fast as without a limit.
ARENAS = 4
#: M_ARENA_MAX of malloc.h.
_ARENA_MAX = -8
#: Environment variables by which users configure malloc themselves.
_USER_SETTINGS = ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
#: Seconds for which a thread may keep the interpreter from the event loop, which waits as long each
#: time that it has looked for events: ten times and more before a first token.
_TURN = 0.0005


def bound_arenas(environment: Mapping[str, str]) -> bool:
    """Limit the number of malloc arenas. Call it before starting threads.

    Returns whether the limit was set: False if `environment` configures malloc, or without glibc.
    """
    if any(environment.get(name) for name in _USER_SETTINGS):
        return False
    library = ctypes.CDLL(None)
    return hasattr(library, "mallopt") and bool(library.mallopt(_ARENA_MAX, ARENAS))


def share_interpreter() -> None:
    """Let the event loop interrupt threads that compute in Python, such as those that check the
    lines of a batch, ten times as early as by default.
    """
    sys.setswitchinterval(_TURN)


def give_back() -> bool:
    """Release the free pages of all arenas to the system. Takes milliseconds.

    Returns whether any memory was released.
    """
    library = ctypes.CDLL(None)
    return hasattr(library, "malloc_trim") and bool(library.malloc_trim(0))
