"""How a step's values describe themselves to recorders (device graphs, replayed kernel calls)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modulm.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from typing import Self

    import torch

__all__ = ["API", "Recordable"]

API = 1


class Recordable:
    """A value of one step whose tensors a recorder may keep in fixed buffers.

    A recording is replayed for another step by copying that step's `tensors` and `tables` into the
    recording's buffers. This requires equal keys and shapes, so the key must include everything
    else that kernel arguments depend on. Steps of classes that do not override `key` are not
    recorded.
    """

    def key(self) -> Hashable | None:
        """Return what two steps must have in common; None: the step cannot be recorded."""
        return None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors whose values change between steps, in a fixed order."""
        return ()

    def tables(self) -> tuple[torch.Tensor, ...]:
        """Return block tables [rows, blocks]; a recording's may be wider, padded with 0."""
        return ()

    def over(self, tensors: Sequence[torch.Tensor], tables: Sequence[torch.Tensor]) -> Self:
        """Return a copy with these tensors and tables."""
        raise UnsupportedError(f"{type(self).__name__} cannot be recorded")
