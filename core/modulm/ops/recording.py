"""Fixed buffers for recorded steps (device graphs, replayed kernel calls)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from modulm.contracts.recording import Recordable

__all__ = ["FixedInputs", "shapes", "signature"]

#: Minimum width of recorded block tables; wider ones are powers of two.
_COLUMNS = 16

StepT = TypeVar("StepT", bound="Recordable")


def _room(width: int) -> int:
    return max(_COLUMNS, 1 << (width - 1).bit_length())


def signature(step: Recordable, room: Callable[[int], int] = _room) -> Hashable | None:
    """Return a key that is equal for steps that can share a recording; None: cannot be recorded.

    room: maps the width of a step's block table to that of the recorded one.
    """
    key = step.key()
    return None if key is None else (key, *shapes(step.tensors(), step.tables(), room))


def shapes(
    tensors: Sequence[Tensor], tables: Sequence[Tensor], room: Callable[[int], int] = _room
) -> tuple[Hashable, Hashable]:
    """Return what a signature contains of a step's tensors and tables."""
    sizes = [(table.shape[0], room(table.shape[1])) for table in tables]
    return tuple([tensor.shape for tensor in tensors]), tuple(sizes)


class FixedInputs(Generic[StepT]):
    """A step over fixed buffers, into which later steps of equal signature are copied.

    zeros: allocates a buffer of a shape and dtype that stays in place. room: as in `signature`.
    """

    def __init__(
        self,
        step: StepT,
        zeros: Callable[..., Tensor] = torch.zeros,
        room: Callable[[int], int] = _room,
    ) -> None:
        tensors, tables = step.tensors(), step.tables()
        self._tensors = [zeros(t.shape, dtype=t.dtype, device=t.device) for t in tensors]
        self._tables = [
            zeros((len(t), room(t.shape[1])), dtype=t.dtype, device=t.device) for t in tables
        ]
        self._widths = [0] * len(tables)
        self.step: StepT = step.over(self._tensors, self._tables)
        self.put(step)

    def put(self, step: StepT) -> None:
        """Copy the values of another step of the same signature."""
        torch._foreach_copy_(self._tensors, list(step.tensors()), non_blocking=True)
        for index, (buffer, table) in enumerate(zip(self._tables, step.tables(), strict=True)):
            width, before = table.shape[1], self._widths[index]
            buffer[:, :width].copy_(table, non_blocking=True)
            if width < before:
                buffer[:, width:before] = 0
            self._widths[index] = width
