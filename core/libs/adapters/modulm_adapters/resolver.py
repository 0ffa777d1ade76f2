"""Adapter resolver: finds an adapter that a request names and that is not loaded (group
`modulm.adapter_resolvers`).

A server asks the installed resolvers, by name, for a name that it does not know; the first path is
loaded and stays. Which names there are is for clients to choose: a resolver takes none for a path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from pathlib import Path

    from modulm.contracts.config import EngineConfig

__all__ = ["API", "AdapterResolver"]

API = 1


class AdapterResolver(ABC):
    """Where adapters are found by name."""

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]

    @classmethod
    @abstractmethod
    def of(cls, config: EngineConfig) -> Self | None:
        """The resolver that the configuration asks for, or None if it asks for none.

        Raises ConfigError for one that cannot be used.
        """

    @abstractmethod
    def resolve(self, name: str) -> Path | None:
        """The folder of the adapter called `name`, or None if there is none here.

        Runs on a thread and may take long. Raises CheckpointError for one that there is and that
        cannot be had.
        """
