"""KV connector: moves cache blocks to and from another place (group `modulm.kv_connectors`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["API", "KVConnector"]

API = 1


class KVConnector(ABC):
    """Finds and stores whole cache blocks by their chained hash."""

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]

    @abstractmethod
    def matched(self, hashes: Sequence[bytes]) -> int:
        """How many of the leading blocks, by hash, the other place holds."""

    @abstractmethod
    def load(self, hashes: Sequence[bytes], blocks: Sequence[int], caches: Sequence[Any]) -> None:
        """Fill the blocks; raises if any cannot be had (the rows are then recomputed)."""

    @abstractmethod
    def save(self, hashes: Sequence[bytes], blocks: Sequence[int], caches: Sequence[Any]) -> None:
        """Store full blocks."""
