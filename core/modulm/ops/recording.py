"""Fixed buffers for recorded steps (CUDA graphs, replayed kernel calls)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from modulm.contracts.recording import Recordable

__all__ = ["FixedInputs", "signature"]

#: Columns that a recorded block table has at least; more come as powers of two.
_COLUMNS = 16

StepT = TypeVar("StepT", bound="Recordable")


def _room(width: int) -> int:
    return max(_COLUMNS, 1 << (width - 1).bit_length())


def signature(step: Recordable, room: Callable[[int], int] = _room) -> Hashable | None:
    """Equal for steps of which one recording serves all; None if the step cannot be recorded.

    room: how wide a recorded block table is, given the width of the step's.
    """
    key = step.key()
    if key is None:
        return None
    shapes = tuple([tensor.shape for tensor in step.tensors()])
    return key, shapes, tuple([(len(table), room(table.shape[1])) for table in step.tables()])


class FixedInputs(Generic[StepT]):
    """A step over buffers of its own, into which later steps of equal signature are copied.

    `zeros` makes a buffer of a shape and dtype, in memory that stays in place; `room` as in
    `signature`.
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
        """Take the numbers of another step of the same signature."""
        torch._foreach_copy_(self._tensors, list(step.tensors()), non_blocking=True)
        for index, (held, given) in enumerate(zip(self._tables, step.tables(), strict=True)):
            width, before = given.shape[1], self._widths[index]
            held[:, :width].copy_(given, non_blocking=True)
            if width < before:
                held[:, width:before] = 0
            self._widths[index] = width
