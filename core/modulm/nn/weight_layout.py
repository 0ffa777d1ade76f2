"""Maps checkpoint tensors to regions of parameters on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from attrs import frozen

from modulm.contracts.quantization import Axis, LinearSpec, ParamSpec, Shard
from modulm.errors import UnsupportedError
from modulm.nn.weight_slots import Part

__all__ = ["layout"]

_ALL = slice(None)


def layout(
    param: ParamSpec, stored: str, spec: LinearSpec, paths: Sequence[str]
) -> tuple[tuple[Part, ...], ...]:
    """Return the ways in which a checkpoint may store `param` of a layer, most common first.

    stored: the parameter's name in the file. paths: of the parts, with {expert} for stacked
    experts. Raises UnsupportedError if this rank's share cannot be sliced.
    """
    if param.part is not None:
        spec, paths = spec.only(param.part), paths[param.part : param.part + 1]
    alone, joined = _alone(spec), _joined(spec, len(spec.parts))
    if not spec.experts:
        ways = [_way(param, spec, [f"{path}.{stored}" for path in paths], alone)]
        if len(paths) > 1:
            name = f"{spec.name}.{stored}"
            ways += [_way(param, spec, [name] * len(paths), p) for p in (joined, _joined(spec, 1))]
        return tuple(ways)
    one = _way(param, spec, paths, alone)
    each = [
        Part(
            f"{part.name.format(expert=spec.expert_shard.start + expert)}.{stored}",
            part.shape,
            part.source,
            (slice(expert, expert + 1), *part.target),
            part.transform,
            part.shared,
        )
        for expert in range(spec.experts)
        for part in one
    ]
    stacks = [f"{path.replace('{expert}.', '')}.{stored}" for path in paths]
    whole = spec.name if stored == "weight" else f"{spec.name}.{stored}"
    return (
        tuple(each),
        _way(param, spec, [whole] * len(paths), joined, stacked=True),
        _way(param, spec, stacks, alone, stacked=True),
    )


@frozen
class _Piece:
    """A fused part in a stored tensor: `shard` of its outputs are copied to offset `at`.

    On an axis of parts the tensor has `stored` entries, of which `source` is this part's.
    """

    shard: Shard
    at: int
    place: slice
    stored: int = 1
    source: slice = _ALL


def _alone(spec: LinearSpec) -> list[_Piece]:
    """Return the parts if each is stored as a tensor."""
    starts = accumulate(spec.parts, initial=0)
    return [
        _Piece(shard, at, slice(i, i + 1))
        for i, (shard, at) in enumerate(zip(spec.shards, starts, strict=False))
    ]


def _joined(spec: LinearSpec, stored: int) -> list[_Piece]:
    """Return the parts if one tensor stores all, with `stored` entries on axes of parts."""
    total = sum(shard.total for shard in spec.shards)
    begins = accumulate((shard.total for shard in spec.shards), initial=0)
    return [
        _Piece(
            Shard(begin + piece.shard.start, piece.shard.size, total),
            piece.at,
            piece.place,
            stored,
            piece.place if stored > 1 else _ALL,
        )
        for piece, begin in zip(_alone(spec), begins, strict=False)
    ]


def _way(
    param: ParamSpec,
    spec: LinearSpec,
    names: Sequence[str],
    pieces: Sequence[_Piece],
    *,
    stacked: bool = False,
) -> tuple[Part, ...]:
    """Build a way from one tensor region per piece. stacked: experts are a leading dimension."""
    parts: list[Part] = []
    shared = len(pieces) > 1 and not any(axis.along in ("outputs", "parts") for axis in param.axes)
    for name, piece in zip(names, pieces, strict=True):
        if shared and parts and name == parts[0].name:
            break
        places = [_place(axis, spec, piece) for axis in param.axes]
        if stacked:
            own = spec.expert_shard
            places.insert(0, (own.total, slice(own.start, own.start + own.size), _ALL))
        shape = tuple(stored for stored, _, _ in places)
        source = tuple(taken for _, taken, _ in places)
        target = tuple(region for _, _, region in places)
        parts.append(Part(name, shape, source, target, param.transform, shared))
    return tuple(parts)


def _place(
    axis: Axis, spec: LinearSpec, piece: _Piece
) -> tuple[int, slice | tuple[int, ...], slice]:
    """Return (stored entries along `axis`, this rank's source region, its target region)."""
    if axis.along == "parts":
        return piece.stored, piece.source, piece.place
    if axis.along == "":
        return axis.size, _ALL, _ALL
    shard, at = (spec.input_shard, 0) if axis.along == "inputs" else (piece.shard, piece.at)
    step, block, entries = axis.step(spec), axis.block, axis.entries
    ends = shard.start + shard.size
    if axis.indivisible and (
        shard.start % block or at % block or (ends % block and ends != shard.total)
    ):
        raise UnsupportedError(
            f"{spec.name}: {shard.size} {axis.along} from {shard.start} cannot be sliced from "
            f"{shard.total}: the checkpoint packs {block} together"
        )
    first, count = at // step, -(-shard.size // step)
    target = slice(first * entries, (first + count) * entries)
    stored = -(-shard.total // block) * entries
    if step == block:
        begin = shard.start // block
        return stored, slice(begin * entries, (begin + count) * entries), target
    blocks = ((shard.start + i * step) // block for i in range(count))
    source = tuple(block * entries + entry for block in blocks for entry in range(entries))
    return stored, source, target
