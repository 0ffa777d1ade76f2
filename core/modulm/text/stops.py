"""Stop strings in a text that arrives in pieces.

The scan is of the whole text: how it is cut changes neither what is emitted in total nor which
stop string ends it. The first stop string to be complete wins; of several that are complete at
the same place, the longest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["StopScanner"]


class StopScanner:
    """Finds the end of one text. After a match it is spent: feed it nothing more.

    `include` keeps the stop string in the text; else whatever may turn out to be the beginning
    of one is held back until it cannot be.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if "" in stops:
            raise ValueError("stops: an empty stop string would end every text at once")
        self._stops = tuple(stops)
        self._include = include
        self._reach = max(map(len, self._stops), default=1) - 1
        #: The last characters seen; the final `_held` of them are not emitted yet.
        self._tail = ""
        self._held = 0

    def feed(self, delta: str) -> tuple[str, str | None]:
        """More text -> (text that is certain, the stop string that ended it or None)."""
        if not self._stops:
            return delta, None
        seen = len(self._tail)
        emitted = seen - self._held
        text = self._tail + delta
        match = self._first(text, seen)
        if match is not None:
            end, stop = match
            self._tail, self._held = "", 0
            return text[emitted : end if self._include else end - len(stop)], stop
        self._held = 0 if self._include else self._open(text)
        keep = min(self._reach, len(text))
        self._tail = text[len(text) - keep :]
        return text[emitted : len(text) - self._held], None

    def finish(self) -> str:
        """The text is over: what was held back, which is no stop string after all."""
        rest = self._tail[len(self._tail) - self._held :]
        self._tail, self._held = "", 0
        return rest

    def _first(self, text: str, seen: int) -> tuple[int, str] | None:
        """(end, stop) of the match that is complete first, among those that end after `seen`."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                found = (start + len(stop), start, stop)
                best = found if best is None else min(best, found)
        return None if best is None else (best[0], best[2])

    def _open(self, text: str) -> int:
        """Length of the longest end of `text` that some stop string begins with."""
        longest = 0
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while start >= 0 and len(text) - start > longest:
                if stop.startswith(text[start:]):
                    longest = len(text) - start
                    break
                start = text.find(stop[0], start + 1)
        return longest
