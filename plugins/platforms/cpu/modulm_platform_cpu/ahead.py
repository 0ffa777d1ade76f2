"""Pages of caches that a thread provides before they are written to.

The system provides a page when it is first touched. On virtual machines whose host takes free
memory back, a huge page takes 5 ms, in the middle of a step. Blocks of a cache are taken in order,
so a thread keeps the next few pages of each cache ready. It sees by their content which were used.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable

__all__ = ["AHEAD", "Ahead", "keep_ahead", "populate"]

_PAGE = 2 << 20
#: Most bytes of a cache that are provided before they are used; and at most this share of it.
AHEAD, _SHARE = 8 << 20, 8
_SAMPLES, _SAMPLE = 16, 64
#: Between looks at the caches.
_SECONDS = 0.5
#: madvise's MADV_POPULATE_WRITE (Linux 5.14).
_POPULATE_WRITE = 23


def populate(address: int, size: int) -> bool:
    """Provide the pages of [address, address + size); return whether the system can do that.

    address: of a page.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return not madvise(address, size, _POPULATE_WRITE)


class _Area:
    """A mapping of `size` bytes; pages up to `used` were written to, up to `provided` are ready."""

    def __init__(self, area: mmap.mmap, address: int, size: int) -> None:
        self.area = weakref.ref(area)
        self.address, self.size = address, size
        self.most = min(AHEAD, size // _SHARE // _PAGE * _PAGE)
        self.used = self.provided = 0

    def look(self) -> bool:
        """Return whether pages were written to since the last time."""
        area, before = self.area(), self.used
        if area is not None:
            for page in range(self.used, self.provided, _PAGE):
                if _written(area, page):
                    self.used = page + _PAGE
        return self.used > before

    @property
    def lasts(self) -> bool:
        """Whether the mapping exists and has pages that were not provided."""
        return self.provided + _PAGE <= self.size and self.area() is not None

    @property
    def due(self) -> bool:
        """Whether the next page may be provided."""
        return self.provided - self.used < self.most

    def provide(self, populate: Callable[[int, int], bool]) -> None:
        """Provide the next page; never again if the system cannot."""
        area = self.area()  # which stays mapped meanwhile
        if area is not None and populate(self.address + self.provided, _PAGE):
            page, self.provided = self.provided, self.provided + _PAGE
            if _written(area, page):  # by a step that came first
                self.used = self.provided
        else:
            self.size = 0


def _written(area: mmap.mmap, page: int) -> bool:
    step = _PAGE // _SAMPLES
    return any(any(area[at : at + _SAMPLE]) for at in range(page, page + _PAGE, step))


class Ahead:
    """Keeps pages ready in all mappings that were added and still exist.

    populate: see `populate`. The thread ends with the last mapping that has pages left, or when the
    system cannot provide any.
    """

    def __init__(self, populate: Callable[[int, int], bool] = populate) -> None:
        self._populate = populate
        self._areas: list[_Area] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, area: mmap.mmap, address: int, size: int) -> None:
        """Keep pages of `area` ready, which lies at `address`, if it is large enough."""
        found = _Area(area, address, size)
        if not found.most:
            return
        with self._lock:
            self._areas.append(found)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="pages", daemon=True)
                self._thread.start()

    def step(self) -> bool:
        """Provide one page, of the cache with the fewest; return whether there may be more to do.

        While steps write to new pages, the cores are left to them.
        """
        with self._lock:
            areas = self._areas = [one for one in self._areas if one.lasts]
        written = [one.look() for one in areas]
        if any(written):
            return False
        due = [one for one in areas if one.due]
        if due:
            min(due, key=lambda one: one.provided - one.used).provide(self._populate)
        return bool(due)

    def _serve(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(_SECONDS)
            while self.step():
                pass
            with self._lock:
                if not any(one.lasts for one in self._areas):
                    self._thread = None
                    return


_provider = Ahead()


def keep_ahead(area: mmap.mmap, address: int, size: int) -> None:
    """Keep pages of `area` ready in this process, as `Ahead.add` does."""
    _provider.add(area, address, size)


def _renew() -> None:
    """In a child after a fork, whose threads are gone."""
    global _provider
    _provider = Ahead()


os.register_at_fork(after_in_child=_renew)
