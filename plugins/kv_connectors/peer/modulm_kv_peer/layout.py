"""What a stored block consists of, and how blocks of ranks with more or fewer heads are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from attrs import frozen

from modulm_kv_peer.wire import Fault
from modulm_kv_transfer.copies import BlockCopier, merged

__all__ = ["Layout", "Loader", "block_loader", "source_ranks"]

#: Fills blocks (ids by cache group) from stored rows, one for each: all their tensors, or some.
Loader = Callable[[Sequence[Sequence[int]], Sequence[torch.Tensor], Sequence[int] | None], None]


@frozen
class Layout:
    """The tensors of a block, in the order of their bytes: (cache group, shape in bytes) of each.

    The last dimension of a shape counts bytes, so it tells item sizes apart.
    """

    tensors: tuple[tuple[int, tuple[int, ...]], ...]

    @classmethod
    def of(cls, copier: BlockCopier) -> Layout:
        """Return the layout of this rank's blocks."""
        return cls(tuple((g, tuple(t.view(torch.uint8).shape[1:])) for g, t in copier.tensors))

    @classmethod
    def unpacked(cls, value: Any) -> Layout:
        """Read a peer's layout. Raises Fault."""
        try:
            tensors = tuple((int(group), tuple(map(int, shape))) for group, shape in value)
        except (TypeError, ValueError) as error:
            raise Fault("its layout cannot be read") from error
        if any(size < 1 for _, shape in tensors for size in (0, *shape)[1:]):
            raise Fault("its layout cannot be read")
        return cls(tensors)

    @property
    def width(self) -> int:
        """Bytes of a block."""
        return sum(prod(shape) for _, shape in self.tensors)

    def spans(self, tensors: Sequence[int] | None) -> list[tuple[int, int]]:
        """Return where tensors are in a block: (start, end), adjacent ones as one. None: all."""
        if tensors is None:
            return [(0, self.width)]
        ends = list(accumulate((prod(shape) for _, shape in self.tensors), initial=0))
        return merged((ends[index], ends[index + 1]) for index in tensors)


@frozen
class _Slice:
    """A part of a tensor's heads: from `first` on there, from `at` on here, `count` of them.

    tensor: its index. target: [blocks, ...] uint8. start: of the tensor in a stored row. shape:
    stored, of a block. axis: of the heads in the shape, or None if the whole tensor is alike.
    """

    tensor: int
    group: int
    target: torch.Tensor
    start: int
    shape: tuple[int, ...]
    axis: int | None
    at: int
    first: int
    count: int


def source_ranks(rank: int, here: int, there: int) -> range:
    """Return the ranks of another engine that hold what a rank needs.

    rank: of this engine, stages counted in. here, there: tensor parallel sizes. Raises Fault unless
    one of them is a multiple of the other.
    """
    if there < 1 or max(here, there) % min(here, there):
        message = f"refused: tensor_parallel_size is {there} where the blocks are, and {here} here"
        raise Fault(f"{message}: one must be a multiple of the other")
    stage, share = divmod(rank, here)
    first = stage * there + share * there // here
    return range(first, first + max(there // here, 1))


def block_loader(
    copier: BlockCopier, layout: Layout, rank: int, here: int, source: int, there: int
) -> Loader | None:
    """Return the function that loads blocks of the rank `source` of another engine.

    None if they hold only copies of what an earlier rank gives. layout: of the source's blocks. See
    `source_ranks` for the others. Raises Fault if the blocks differ in more than their heads.
    """
    own = Layout.of(copier)
    if layout == own and (there <= here or source == source_ranks(rank, here, there)[0]):
        return copier.load
    slices, start = [], 0
    if len(own.tensors) != len(layout.tensors):
        raise Fault("refused: the cache layout is different")
    pairs = zip(copier.tensors, own.tensors, layout.tensors, strict=True)
    for index, ((group, tensor), (_, shape), (other_group, other)) in enumerate(pairs):
        if group != other_group or len(shape) != len(other):
            raise Fault("refused: the cache layout is different")
        part = _slice(shape, other, rank % here, here, source % there, there)
        if part is not None:
            slices.append(_Slice(index, group, tensor.view(torch.uint8), start, other, *part))
        start += prod(other)
    return _SliceLoader(slices) if slices else None


def _slice(
    shape: tuple[int, ...], other: tuple[int, ...], share: int, here: int, source: int, there: int
) -> tuple[int | None, int, int, int] | None:
    """Return (axis, first head here, first head there, heads) to copy of a tensor; None: nothing.

    share, source: ranks within their tensor parallel groups.
    """
    axes = [axis for axis, sizes in enumerate(zip(shape, other, strict=True)) if len({*sizes}) > 1]
    if not axes:  # alike on all ranks, or each rank has one head
        offset = source - share * there // here
        return (None, 0, 0, 0) if offset == 0 else None
    (axis, *more) = axes
    heads, theirs = shape[axis], other[axis]
    larger, smaller = max(heads, theirs), min(heads, theirs)
    ranks = max(here, there) // min(here, there)
    parts = larger // smaller
    if more or larger % smaller or ranks % parts or (heads > theirs) != (there > here):
        raise Fault("refused: the cache layout is different")
    copies = ranks // parts  # ranks in a row that have the same heads
    if theirs > heads:
        return axis, 0, (share % ranks) // copies * heads, heads
    number = source % ranks
    if number % copies:
        return None
    return axis, number // copies * theirs, 0, theirs


class _SliceLoader:
    """Copies heads of stored rows into blocks."""

    def __init__(self, slices: Sequence[_Slice]) -> None:
        self._slices = slices

    def __call__(
        self,
        blocks: Sequence[Sequence[int]],
        rows: Sequence[torch.Tensor],
        tensors: Sequence[int] | None = None,
    ) -> None:
        for one in self._slices:
            if tensors is not None and one.tensor not in tensors:
                continue
            target, end = one.target, one.start + prod(one.shape)
            source = torch.stack([row[one.start : end].view(one.shape) for row in rows])
            if one.axis is not None:
                target = target.narrow(one.axis + 1, one.at, one.count)
                source = source.narrow(one.axis + 1, one.first, one.count)
            ids = torch.tensor(blocks[one.group], device=target.device)
            target.index_copy_(0, ids, source.to(target.device))
