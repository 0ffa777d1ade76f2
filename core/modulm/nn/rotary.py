"""Tables of rotary positions, shared by layers; modulm-layers computes the angles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from modulm.contracts.model import Batch

__all__ = ["RotaryKind", "RotaryTable"]


class RotaryTable(Protocol):
    """A table [positions, size] fp32 of cosines, then sines, shared by layers of one kind.

    It is empty until the loader knows the maximum sequence length and calls `fill`.
    """

    cos_sin: torch.Tensor

    def of_step(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (table, row indices [tokens]) for a step; positions may have several axes."""

    def fill(self, rows: int, length: int, device: torch.device) -> None:
        """Compute `rows` positions. length: maximum sequence length."""


class RotaryKind(Protocol):
    """A kind of rotary positions, a frozen value; layers with equal kinds share a table."""

    @property
    def size(self) -> int:
        """Length of a row of the table."""

    def table(self) -> RotaryTable:
        """Create an empty table of this kind."""
