"""Models whose weights are not always where their modules use them: layers in host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from modulm.contracts.quantization import Writer
    from modulm.nn.weight_slots import Unit

__all__ = ["MovedWeights", "moved_weights_of", "note_moved_weights"]


class MovedWeights(ABC):
    """Weights of a model that an update reaches through these methods, between two steps.

    Units are those of `modulm.loading.Loaded`.
    """

    @abstractmethod
    def fetch(self, unit: Unit) -> None:
        """Bring a unit's weights to where its modules use them. Others may leave their place."""

    @abstractmethod
    def store(self) -> None:
        """Keep what was written to fetched weights. Called when the update is in place."""

    def writer(self, unit: Unit, attribute: str) -> Writer | None:
        """Return what overwrites an attribute in place of the quantization method's writer."""
        return None

    def check_reload(self, unit: Unit) -> None:
        """Raise UnsupportedError for a unit that can be overwritten, but not loaded again."""


_MOVED: WeakKeyDictionary[Any, MovedWeights] = WeakKeyDictionary()


def note_moved_weights(model: Any, weights: MovedWeights) -> None:
    """Let updates reach weights of a loaded model that are elsewhere."""
    _MOVED[model] = weights


def moved_weights_of(model: Any) -> MovedWeights | None:
    """Return how to reach weights of a model that are elsewhere; None if none are."""
    return _MOVED.get(model)
