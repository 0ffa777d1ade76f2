"""Encoders that pause between layers, so that steps of other requests can run in between."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable
from typing import Any, TypeAlias, TypeVar

from torch import Tensor
from torch.nn import Module

__all__ = ["Pieces", "Tower", "through", "whole"]

T = TypeVar("T")

#: Yields after each layer the number of rows (patches, frames) it processed; returns the result
#: (`modulm.contracts.model.Model.encode_in_pieces`).
Pieces: TypeAlias = Generator[int, None, T]


def whole(pieces: Pieces[T]) -> T:
    """Run all pieces and return their result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: T = end.value
            return result


def through(layers: Iterable[Module], x: Tensor, *arguments: Any) -> Pieces[Tensor]:
    """Run layers on x: [rows, hidden], with the remaining arguments."""
    for layer in layers:
        x = layer(x, *arguments)
        yield len(x)
    return x


class Tower(Module):
    """An encoder whose `run` pauses between layers; calling it runs it in one go."""

    @abstractmethod
    def run(self, *arguments: Any) -> Pieces[Any]:
        """Yield after each layer; return the output."""

    def forward(self, *arguments: Any) -> Any:
        """Run all layers and return the output."""
        return whole(self.run(*arguments))
