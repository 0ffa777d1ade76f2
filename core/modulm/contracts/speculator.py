"""Speculator: proposes tokens that the model then verifies (group `modulm.speculators`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

__all__ = ["API", "Speculator"]

API = 1


class Speculator(ABC):
    """Proposes up to k next tokens per row. Verification keeps the model's distribution exact."""

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    Config: ClassVar[type]

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def propose(self, rows: np.ndarray, histories: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """One int64 array per row (possibly empty), given each row's tokens so far."""

    def release(self, row: int) -> None:
        """A row is gone."""
