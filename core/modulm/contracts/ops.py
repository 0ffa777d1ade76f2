"""The table of ops that layers and backends call; `contracts.kernels` says who fills it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

__all__ = ["API", "Op", "Ops"]

API = 1

Op = Callable[..., Any]


class Ops(Protocol):
    """The table that the engine binds once: `ops.rms_norm(...)` is a provider's op or its twin.

    `providers` names, for each op, who computes it.
    """

    providers: Mapping[str, str]

    def __getattr__(self, name: str) -> Op: ...
