"""Count compilations of this process, of programs and of single operations alike."""

from __future__ import annotations

from typing import Any

import jax

__all__ = ["COMPILATIONS", "Compilations"]

#: JAX's event for each call of the compiler; reading the persistent cache is one too.
_EVENT = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """The number of compilations and the seconds that they took."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, seconds: float, **more: Any) -> None:
        if event == _EVENT:
            self.count += 1
            self.seconds += seconds


COMPILATIONS = Compilations()
