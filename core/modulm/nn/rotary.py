"""Rotary positions as the builder and the loader know them; modulm-layers computes the angles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from modulm.contracts.model import Batch

__all__ = ["RotaryKind", "RotaryTable"]


class RotaryTable(Protocol):
    """A table [positions, size] fp32 of cosines, then sines, that layers of one kind share.

    It is empty until the loader knows how long sequences can get and calls `fill`.
    """

    cos_sin: torch.Tensor

    def of_step(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(table, [tokens] rows of it) of a step, whose positions may be on several axes."""

    def fill(self, rows: int, length: int, device: torch.device) -> None:
        """Make `rows` positions; `length` is the longest sequence admitted."""


class RotaryKind(Protocol):
    """One kind of rotary positions, a frozen value: layers with equal ones share a table."""

    @property
    def size(self) -> int:
        """Numbers in a row of the table."""

    def table(self) -> RotaryTable:
        """A table of this kind, without rows yet."""
