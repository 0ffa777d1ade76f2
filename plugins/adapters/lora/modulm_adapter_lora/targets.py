"""Maps checkpoint names to a model's layers and their layout."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from modulm.contracts.quantization import LinearKind
from modulm.errors import CheckpointError

if TYPE_CHECKING:
    from modulm.contracts.adapter import Naming
    from modulm.contracts.quantization import LinearSpec

__all__ = ["RowRange", "Target", "Targets", "layout_of", "rows_of", "targets_of"]


@frozen
class RowRange:
    """Rows `source` to `source + size` of a stored tensor: the layer's outputs from `start`."""

    source: int
    size: int
    start: int


@frozen
class Target:
    """The location of a stored name: a weight of [outputs, inputs], of which this rank has the rows
    in `slices` and the input `columns`.

    experts: number of matrices stacked under the name. expert: index of the one in this target.
    """

    layer: str
    outputs: int
    inputs: int
    slices: tuple[RowRange, ...]
    columns: slice
    experts: int = 0
    expert: int | None = None


class Targets:
    """The targets of stored names, without their suffixes."""

    def __init__(self, specs: Collection[LinearSpec]) -> None:
        self._targets = {name: target for spec in specs for name, target in targets_of(spec)}
        heads = [spec.name for spec in specs if spec.kind is LinearKind.LM_HEAD]
        #: The target of the LM head, if there is one.
        self.head = self._targets[heads[0]] if len(heads) == 1 else None
        self._below: dict[str, list[str]] = {}
        for name, target in self._targets.items():
            if target.experts:
                self._below.setdefault(name.rpartition(".")[0], []).append(name)

    def __bool__(self) -> bool:
        return bool(self._targets)

    def get(self, name: str) -> Target | None:
        """Return the target of one of the model's names."""
        return self._targets.get(name)

    def below(self, module: str) -> list[str]:
        """Return the names of expert stacks directly below a module."""
        return self._below.get(module, [])


def targets_of(spec: LinearSpec) -> Iterator[tuple[str, Target]]:
    """Yield every name under which a checkpoint may store the layer or a part of it."""
    starts = list(accumulate(spec.parts, initial=0))
    begins = list(accumulate((shard.total for shard in spec.shards), initial=0))
    columns = slice(spec.input_shard.start, spec.input_shard.start + spec.inputs)
    width = spec.input_shard.total
    joined = tuple(
        RowRange(begin + shard.start, shard.size, start)
        for begin, shard, start in zip(begins, spec.shards, starts, strict=False)
    )
    stacked = spec.experts
    for number, (shard, start) in enumerate(zip(spec.shards, starts, strict=False)):
        slices = (RowRange(shard.start, shard.size, start),)
        for expert in range(spec.experts):
            name = spec.expert_names[number].format(expert=expert)
            yield name, Target(spec.name, shard.total, width, slices, columns, expert=expert)
        if stacked:
            name = spec.expert_names[number].replace("{expert}.", "")
            yield name, Target(spec.name, shard.total, width, slices, columns, stacked)
        elif len(spec.parts) > 1:
            yield spec.part_names[number], Target(spec.name, shard.total, width, slices, columns)
    if len(spec.parts) > 1 and begins[-1] == spec.outputs:
        joined = (RowRange(0, spec.outputs, 0),)
    yield spec.name, Target(spec.name, begins[-1], width, joined, columns, stacked)


def layout_of(
    names: Naming, stored: str, *, outputs: Sequence[int]
) -> tuple[list[tuple[str, tuple[int, ...]]], bool]:
    """Determine what the model makes of a stored weight: (names and shapes, whether the file stores
    inputs first).

    outputs: sizes of all dimensions except the inputs, which are assumed to be larger than any of
    these.
    """
    wide = max(outputs) + 1
    failed: Exception | None = None
    for turned in (False, True):
        shape = (*outputs[:-1], wide, outputs[-1]) if turned else (*outputs, wide)
        try:
            pieces = [
                (name, tuple(piece.shape))
                for name, piece in names(stored, torch.empty(shape, device="meta"))
            ]
        except (RuntimeError, ValueError, IndexError) as error:
            failed = error
            continue
        if all(shape[-1] == wide for _, shape in pieces):
            return pieces, turned
    raise CheckpointError(
        f"{stored}: {list(outputs)} outputs do not fit the model"
        + (f": {failed}" if failed else "")
    )


def rows_of(names: Naming, stored: str, rows: Tensor, turned: bool) -> dict[str, Tensor]:
    """Convert the rows [..., outputs, n] of a stored weight to the model's names and layout."""
    oriented = rows.transpose(-1, -2) if turned else rows
    return dict(names(stored, oriented))
