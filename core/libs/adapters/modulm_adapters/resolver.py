"""Adapter resolver: finds adapters that are not loaded (group `modulm.adapter_resolvers`).

If a request names an unknown model, the server calls the installed resolvers in order of their
names and loads the first path returned; the adapter stays loaded. Names come from clients, so
resolvers must not use them as paths.
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
    """Finds adapters by name."""

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]

    @classmethod
    @abstractmethod
    def of(cls, config: EngineConfig) -> Self | None:
        """Create the resolver from the configuration, or return None if it is off.

        Raises ConfigError for invalid options.
        """

    @abstractmethod
    def resolve(self, name: str) -> Path | None:
        """Return the folder of the adapter `name`, or None if it does not exist here.

        Runs on a thread and may take long. Raises CheckpointError if the adapter exists but cannot
        be loaded.
        """
