"""Detect turns of speech by loudness in an audio stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import numpy as np
from attrs import define, field

__all__ = ["Turn", "TurnDetector"]

#: ("started" or "stopped", index of the sample in the whole stream).
Turn: TypeAlias = tuple[Literal["started", "stopped"], int]
_FRAME = 0.02


@define
class TurnDetector:
    """Follows one stream of `rate` samples per second.

    threshold: loudness that counts as speech, from 0 to 1: 0.5 is -40 dB of full scale, each 0.1 is
    4 dB. silence: seconds of quiet that end a turn. padding: seconds before the first loud frame
    that belong to the turn. Frames last 20 ms.
    """

    rate: int
    threshold: float = 0.5
    silence: float = 0.5
    padding: float = 0.3
    speaking: bool = field(default=False, init=False)
    _at: int = field(default=0, init=False)
    _quiet: int = field(default=0, init=False)
    _rest: np.ndarray = field(factory=lambda: np.zeros(0, np.float32), init=False)

    def feed(self, samples: np.ndarray) -> Iterator[Turn]:
        """Yield the turns that start and stop in the next samples, [n] float32."""
        length = int(_FRAME * self.rate)
        waiting = np.concatenate([self._rest, samples])
        count = len(waiting) // length
        frames = waiting[: count * length].reshape(count, length)
        self._rest = waiting[count * length :]
        loud = np.sqrt(np.square(frames, dtype=np.float64).mean(axis=1)) >= self._level
        for one in loud.tolist():
            turn = self._step(one, length)
            if turn is not None:
                yield turn

    @property
    def _level(self) -> float:
        return float(10 ** (2 * self.threshold - 3))

    def _step(self, loud: bool, length: int) -> Turn | None:
        begin = self._at
        self._at += length
        self._quiet = 0 if loud else self._quiet + length
        if not self.speaking and loud:
            self.speaking = True
            return ("started", max(0, begin - int(self.padding * self.rate)))
        if self.speaking and self._quiet >= self.silence * self.rate:
            self.speaking = False
            return ("stopped", self._at)
        return None
