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

__all__ = ["Cut", "Place", "Places", "layout_of", "places_of", "rows_of"]


@frozen
class Cut:
    """Rows `source` to `source + size` of a stored tensor: the layer's outputs from `start`."""

    source: int
    size: int
    start: int


@frozen
class Place:
    """The location of a stored name: a weight of [outputs, inputs], of which this rank has the rows
    in `cuts` and the input `columns`.

    experts: number of matrices stacked under the name. expert: index of the one in this place.
    """

    layer: str
    outputs: int
    inputs: int
    cuts: tuple[Cut, ...]
    columns: slice
    experts: int = 0
    expert: int | None = None


class Places:
    """The places of stored names, without their suffixes."""

    def __init__(self, specs: Collection[LinearSpec]) -> None:
        self._found = {name: place for spec in specs for name, place in places_of(spec)}
        heads = [spec.name for spec in specs if spec.kind is LinearKind.LM_HEAD]
        #: The place of the LM head, if there is one.
        self.head = self._found[heads[0]] if len(heads) == 1 else None
        self._below: dict[str, list[str]] = {}
        for name, place in self._found.items():
            if place.experts:
                self._below.setdefault(name.rpartition(".")[0], []).append(name)

    def get(self, name: str) -> Place | None:
        """Return the place of one of the model's names."""
        return self._found.get(name)

    def below(self, module: str) -> list[str]:
        """Return the names of expert stacks directly below a module."""
        return self._below.get(module, [])


def places_of(spec: LinearSpec) -> Iterator[tuple[str, Place]]:
    """Yield every name under which a checkpoint may store the layer or a part of it."""
    starts = list(accumulate(spec.parts, initial=0))
    begins = list(accumulate((shard.whole for shard in spec.shards), initial=0))
    columns = slice(spec.input_shard.start, spec.input_shard.start + spec.inputs)
    width = spec.input_shard.whole
    joined = tuple(
        Cut(begin + shard.start, shard.size, start)
        for begin, shard, start in zip(begins, spec.shards, starts, strict=False)
    )
    stacked = spec.experts
    for number, (shard, start) in enumerate(zip(spec.shards, starts, strict=False)):
        cuts = (Cut(shard.start, shard.size, start),)
        for expert in range(spec.experts):
            name = spec.expert_names[number].format(expert=expert)
            yield name, Place(spec.name, shard.whole, width, cuts, columns, expert=expert)
        if stacked:
            name = spec.expert_names[number].replace("{expert}.", "")
            yield name, Place(spec.name, shard.whole, width, cuts, columns, stacked)
        elif len(spec.parts) > 1:
            yield spec.part_names[number], Place(spec.name, shard.whole, width, cuts, columns)
    if len(spec.parts) > 1 and begins[-1] == spec.outputs:
        joined = (Cut(0, spec.outputs, 0),)
    yield spec.name, Place(spec.name, begins[-1], width, joined, columns, stacked)


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
    given = rows.transpose(-1, -2) if turned else rows
    return dict(names(stored, given))
