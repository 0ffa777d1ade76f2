"""Find stop strings in a text that arrives in pieces.

The result does not depend on how the text is split. The stop string that is complete first wins; of
several that end at the same position, the longest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["StopScanner"]


class StopScanner:
    """Finds the end of one text. It must not be fed after a match.

    include: keep the stop string in the output. Otherwise, text that may be the start of a stop
    string is held back.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if "" in stops:
            raise ValueError("stops: an empty stop string would end every text at once")
        self._stops = tuple(stops)
        self._include = include
        self._reach = max(map(len, self._stops), default=1) - 1
        #: The last characters seen; the final `_pending` of them have not been returned yet.
        self._tail = ""
        self._pending = 0

    def feed(self, delta: str) -> tuple[str, str | None]:
        """Add text. Returns (text that is final, the stop string that ended it or None)."""
        if not self._stops:
            return delta, None
        seen = len(self._tail)
        emitted = seen - self._pending
        text = self._tail + delta
        match = self._first(text, seen)
        if match is not None:
            end, stop = match
            self._tail, self._pending = "", 0
            return text[emitted : end if self._include else end - len(stop)], stop
        self._pending = 0 if self._include else self._open(text)
        keep = min(self._reach, len(text))
        self._tail = text[len(text) - keep :]
        return text[emitted : len(text) - self._pending], None

    def finish(self) -> str:
        """Return the text that was held back, at the end of the text."""
        rest = self._tail[len(self._tail) - self._pending :]
        self._tail, self._pending = "", 0
        return rest

    def _first(self, text: str, seen: int) -> tuple[int, str] | None:
        """Return (end, stop) of the match that is complete first, among those that end after
        `seen`.
        """
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[0], best[2])

    def _open(self, text: str) -> int:
        """Return the length of the longest suffix that some stop string starts with."""
        longest = 0
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while start >= 0 and len(text) - start > longest:
                if stop.startswith(text[start:]):
                    longest = len(text) - start
                    break
                start = text.find(stop[0], start + 1)
        return longest
