"""LoRA ops: low-rank additions to a layer's output per group of tokens, in plain torch.

Hu et al., arXiv 2106.09685; many of them in one batch: Chen et al., arXiv 2310.18547.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

__all__ = ["BLOCK", "LoraPiece", "LoraTable", "SlotBlocks", "SlotGroups", "add_lora"]

#: Maximum tokens of steps whose groups are stored at fixed addresses.
_FIXED = 256
#: Fields of an address: rank, address of down, address of up, first output, outputs.
_FIELDS = 5
#: Maximum tokens of a block.
BLOCK = 16


@frozen(eq=False)
class LoraPiece:
    """An adapter's weights for some outputs of a layer, starting at `start`.

    down: [rank, inputs], or [entries, rank] for an embedding table. up: [rank, outputs]. Both are
    contiguous and have the same dtype.
    """

    down: Tensor
    up: Tensor
    start: int = 0


class LoraTable:
    """The adapters in slots 1 ... `slots` of one layer, each with at most `most` pieces.

    inputs: of the layer, or entries of an embedding table. dtype: of all pieces. addresses:
    [slots + 1, most, 5] int64 on `device`, read by kernels; it stays in place, as the pieces do.
    Pieces of one slot change different outputs. rank, widest: the largest rank, and number of
    outputs of a piece, that steps are recorded for; 0 if they are not.
    """

    def __init__(
        self,
        slots: int,
        most: int,
        inputs: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        rank: int = 0,
        widest: int = 0,
    ) -> None:
        self.inputs, self.dtype = inputs, dtype
        self.rank, self.widest = rank, widest
        self.addresses = torch.zeros(slots + 1, most, _FIELDS, dtype=torch.int64, device=device)
        self.pieces: list[tuple[LoraPiece, ...]] = [()] * (slots + 1)

    def put(self, slot: int, pieces: Sequence[LoraPiece]) -> None:
        """Put an adapter into a slot. Raises ValueError for pieces that do not fit."""
        if len(pieces) > self.addresses.shape[1]:
            raise ValueError(f"{len(pieces)} pieces, but the limit is {self.addresses.shape[1]}")
        self.pieces[slot] = tuple(pieces)
        rows = np.zeros(self.addresses.shape[1:], dtype=np.int64)
        for row, piece in zip(rows, pieces, strict=False):
            rank, size = piece.up.shape
            row[:] = rank, piece.down.data_ptr(), piece.up.data_ptr(), piece.start, size
        self.addresses[slot] = torch.from_numpy(rows)


class SlotGroups:
    """The tokens of a step sorted by slot.

    spans: int32, the number of used slots, then slot, begin and end of each. order: [tokens] int32,
    token indices. For small steps both stay in place. indices: `order` as an array.
    """

    def __init__(self, slots: int) -> None:
        self.spans = torch.zeros(1 + 3 * slots, dtype=torch.int32)
        self.used: list[tuple[int, int, int]] = []
        self.tokens = 0
        self.indices = np.zeros(0, dtype=np.int32)
        self.order = self._fixed = torch.zeros(_FIXED, dtype=torch.int32)

    def set(self, slots: np.ndarray) -> None:
        """Set the slots: [tokens] int32, 0 for tokens without an adapter."""
        order = np.argsort(slots, kind="stable").astype(np.int32)
        ordered = slots[order]
        begins = np.flatnonzero(np.diff(ordered, prepend=-1))
        ends = np.append(begins[1:], len(ordered))
        spans = zip(ordered[begins].tolist(), begins.tolist(), ends.tolist(), strict=True)
        self.used = [span for span in spans if span[0]]
        flat = [len(self.used), *(number for span in self.used for number in span)]
        self.tokens, self.indices = len(order), order
        self.spans[: len(flat)] = torch.tensor(flat, dtype=torch.int32)
        self.order = self._fixed
        if len(order) > _FIXED:
            self.order = torch.from_numpy(order)
        else:
            self._fixed[: len(order)] = torch.from_numpy(order)

    def blocks(self) -> np.ndarray:
        """Return [n, 3] int32: slot, first index in `order`, and count of each block."""
        numbers = [
            (slot, first, min(BLOCK, end - first))
            for slot, begin, end in self.used
            for first in range(begin, end, BLOCK)
        ]
        return np.array(numbers, dtype=np.int32).reshape(-1, 3)

    def rows(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each used slot and its token indices, int64."""
        for slot, begin, end in self.used:
            yield slot, self.order[begin:end].long()


class SlotBlocks:
    """The tokens of a step in blocks of one slot, for kernels of recorded steps.

    order: [tokens] int32, token indices. numbers: [blocks, 3] int32: slot, first index in `order`,
    count; blocks without tokens have slot 0. Both stay in place on the device, and their sizes
    depend only on the number of tokens.
    """

    #: Maximum tokens of a step.
    most = 2048

    def __init__(self, slots: int, device: torch.device) -> None:
        self._slots = slots
        self._order = torch.zeros(self.most, dtype=torch.int32, device=device)
        rows = self._count(self.most)
        self._numbers = torch.zeros(rows, 3, dtype=torch.int32, device=device)
        self.tokens = 0

    def _count(self, tokens: int) -> int:
        return tokens // BLOCK + min(self._slots, tokens)

    @property
    def order(self) -> Tensor:
        return self._order[: self.tokens]

    @property
    def numbers(self) -> Tensor:
        return self._numbers[: self._count(self.tokens)]

    def set(
        self, groups: SlotGroups, send: Callable[[Sequence[np.ndarray]], Sequence[Tensor]]
    ) -> None:
        """Set the step's tokens, at most `most`. send: copies arrays to the device."""
        self.tokens = groups.tokens
        numbers = np.zeros((self._count(self.tokens), 3), dtype=np.int32)
        blocks = groups.blocks()
        numbers[: len(blocks)] = blocks
        order, sent = send((groups.indices, numbers))
        self.order.copy_(order, non_blocking=True)
        self.numbers.copy_(sent, non_blocking=True)


def add_lora(out: Tensor, x: Tensor, groups: SlotGroups, table: LoraTable) -> None:
    """out[t] += up^T (down x[t]) for the tokens t of each slot, in fp32, rounded once.

    out: [T, outputs]; x: [T, inputs], or [T] int64 ids of an embedding table.
    """
    for slot, rows in groups.rows():
        at = rows.to(out.device)
        for piece in table.pieces[slot]:
            part = slice(piece.start, piece.start + piece.up.shape[1])
            if x.dtype == torch.int64:
                narrow = piece.down[x[at]].float()
            else:
                narrow = x[at].float() @ piece.down.float().T
            out[at, part] = (out[at, part].float() + narrow @ piece.up.float()).to(out.dtype)
