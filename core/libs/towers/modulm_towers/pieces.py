"""Encoders that stop between layers, so that steps of other requests come between."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable
from typing import Any, TypeAlias, TypeVar

from torch import Tensor
from torch.nn import Module

__all__ = ["Pieces", "Tower", "through", "whole"]

T = TypeVar("T")

#: Stops behind a layer, told how many rows (patches, frames) went through it; returns what all of
#: them make (`modulm.contracts.model.Model.encode_in_pieces`).
Pieces: TypeAlias = Generator[int, None, T]


def whole(pieces: Pieces[T]) -> T:
    """What pieces make, one run after the other."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            found: T = end.value
            return found


def through(layers: Iterable[Module], x: Tensor, *given: Any) -> Pieces[Tensor]:
    """x: [rows, hidden] after the layers, which are given the rest as well."""
    for layer in layers:
        x = layer(x, *given)
        yield len(x)
    return x


class Tower(Module):
    """An encoder whose layers `run` stops between; called, it runs whole."""

    @abstractmethod
    def run(self, *given: Any) -> Pieces[Any]:
        """What the encoder makes of what it is given, in pieces."""

    def forward(self, *given: Any) -> Any:
        """The same at once."""
        return whole(self.run(*given))
