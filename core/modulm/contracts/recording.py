"""What a step's values tell a recorder (CUDA graphs, replayed kernel calls) about themselves."""

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

    A recorded step is repeated for another one by copying the other's `tensors` and `tables` to
    where the recorded one's lay. That is right if both have equal keys and tensors of equal
    shapes, so whatever else the kernels' arguments depend on belongs to the key. A class that
    does not say so is not recorded: its steps run call by call.
    """

    def key(self) -> Hashable | None:
        """What else two steps must have in common; None: the step cannot be recorded."""
        return None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors whose numbers change from step to step, in a fixed order."""
        return ()

    def tables(self) -> tuple[torch.Tensor, ...]:
        """Block tables [rows, blocks]; those of a recording may be wider, filled up with 0."""
        return ()

    def over(self, tensors: Sequence[torch.Tensor], tables: Sequence[torch.Tensor]) -> Self:
        """The same value with these tensors and tables in place of its own."""
        raise UnsupportedError(f"{type(self).__name__} cannot be recorded")
