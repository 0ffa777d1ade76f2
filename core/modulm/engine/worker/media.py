"""What stands in prompts instead of tokens: outputs of encoders, embeddings, positions on axes."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from attrs import evolve, frozen

from modulm.contracts.attention import AttentionSpec
from modulm.contracts.executor import Plan, RowStart
from modulm.contracts.media import MediaItem, crossed_runs
from modulm.contracts.model import Batch, Model
from modulm.engine.worker.input_batch import Runs
from modulm.errors import EngineError

__all__ = ["PromptInputs"]

Pieces: TypeAlias = Generator[int, None, Sequence[torch.Tensor]]


@frozen(eq=False)
class _PromptParts:
    """What a row brought. embeds: index of an item -> the embeddings that came with it, [tokens,
    hidden]; positions: [axes, tokens], of its prompt; runs: see `Runs`.
    """

    media: tuple[MediaItem, ...]
    embeds: Mapping[int, torch.Tensor]
    positions: np.ndarray | None
    offset: int
    runs: Runs


class PromptInputs:
    """Runs the encoders that plans name, keeps their outputs by hash, and puts them into batches.

    Rows of plain tokens cost nothing: they are not known here.
    """

    def __init__(self, model: Model, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._rows: dict[int, _PromptParts] = {}
        self._outputs: dict[bytes, torch.Tensor] = {}
        self._broken: dict[bytes, Exception] = {}
        #: Hash -> the item and what goes on with it, of items of which pieces are left.
        self.begun: dict[bytes, tuple[MediaItem, Pieces]] = {}
        specs = [cache.spec for cache in model.caches]
        self._crosses = any(isinstance(spec, AttentionSpec) and spec.cross for spec in specs)

    def admit(self, start: RowStart) -> None:
        """A row starts; rows of plain tokens are not kept."""
        embeds = {
            index: torch.from_numpy(np.array(item.tensors["embeds"])).to(self._device)
            for index, item in enumerate(start.media)
            if not item.encoded
        }
        if start.media or start.positions is not None:
            self._rows[start.row] = _PromptParts(
                start.media,
                embeds,
                start.positions,
                start.position_offset,
                [[(i.seen, i.length) for i in run] for run in crossed_runs(start.media)],
            )

    def release(self, row: int) -> None:
        """The row is gone; outputs of encoders stay until the scheduler drops them."""
        self._rows.pop(row, None)

    def encode(self, plan: Plan) -> tuple[bytes, ...]:
        """Drop and make what the plan says; what was made in pieces, the last of which was now.

        Raises EngineError for an encoder's wrong output.
        """
        for hashed in plan.drop_media:
            for kept in (self._outputs, self._broken, self.begun):
                kept.pop(hashed, None)
        items = {
            item.hash: item
            for row, index in plan.encode
            if (item := self._rows[row].media[index]).hash not in self._outputs
        }
        if plan.encode_rows:
            pieces = self._model.encode_in_pieces
            self.begun |= {hashed: (item, pieces((item,))) for hashed, item in items.items()}
        elif items:
            self._keep(tuple(items.values()), self._model.encode(tuple(items.values())))
        return tuple(self._go_on(plan.encode_rows or math.inf))

    def _go_on(self, rows: float) -> Iterator[bytes]:
        """Until so many rows have been through a layer; the hashes of what came to its end."""
        while self.begun and rows > 0:
            hashed, (item, pieces) = next(iter(self.begun.items()))
            try:
                ran = self._piece(item, pieces)
            except Exception as error:  # of the step that needs it, not of those in this one
                self._broken[hashed], ran = error, 0
            rows -= ran
            if not ran:
                del self.begun[hashed]
                yield hashed

    def _piece(self, item: MediaItem, pieces: Pieces) -> int:
        """Rows that went through a layer; 0: that was the last, and what it gave is kept."""
        try:
            return next(pieces)
        except StopIteration as end:
            self._keep((item,), end.value)
            return 0

    def _keep(self, items: Sequence[MediaItem], outputs: Sequence[torch.Tensor]) -> None:
        for item, output in zip(items, outputs, strict=True):
            if len(output) != item.length:
                raise EngineError(
                    f"the encoder gave {len(output)} embeddings for an item of kind {item.kind!r} "
                    f"that stands at {item.length} tokens"
                )
            # Encoders may give views of one large tensor, which would stay as long as any of them.
            self._outputs[item.hash] = output.clone()

    def spans(self, plan: Plan) -> np.ndarray | None:
        """[n, 3] int32, as in `StepLayout.spans`, of the items that end in the plan's tokens; a
        prefix that was found again may hold the beginning of one.
        """
        if not self._rows:
            return None
        found = [
            (place, first, end)
            for place, row in enumerate(plan.rows.tolist())
            if row in self._rows
            for item in self._rows[row].media
            for first, end in item.spans
            if plan.starts[place] < end <= plan.starts[place] + plan.counts[place]
        ]
        return np.array(found, dtype=np.int32) if found else None

    def crossed(self, plan: Plan) -> Sequence[Runs] | None:
        """Of each row of the plan what it looks at by cross attention; None for a model that has
        none.
        """
        if not self._crosses:
            return None
        rows = map(self._rows.get, plan.rows.tolist())
        return [() if brought is None else brought.runs for brought in rows]

    def encoded(self, plan: Plan) -> torch.Tensor | None:
        """`Batch.encoded`: [n, width] of the rows that begin in this step; None where none does.

        Raises EngineError where an item's output is needed and is not there.
        """
        if not self._crosses:
            return None
        found = [
            self._output(item)
            for row, start in zip(plan.rows.tolist(), plan.starts.tolist(), strict=True)
            if start == 0 and row in self._rows
            for item in self._rows[row].media
            if item.cross
        ]
        return torch.cat(found) if found else None

    def put(self, batch: Batch, plan: Plan) -> Batch:
        """The batch with what stands in the plan's prompts instead of tokens, and beside them."""
        if not self._rows:
            return batch
        batch = evolve(batch, encoded=self.encoded(plan))
        found = self.embeds(plan)
        if found is not None:
            batch = evolve(batch, embeds=found[0], embeds_mask=found[1])
        positions = self.axis_positions(plan)
        if positions is None:
            return batch
        on_axes = torch.from_numpy(positions).to(self._device)
        if (positions == positions[0]).all():
            # Behind its media a row counts on alike on all axes: a step like any other.
            return evolve(batch, positions=on_axes[0])
        return evolve(batch, axis_positions=on_axes)

    def embeds(self, plan: Plan) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(embeddings [tokens, hidden], mask [tokens] bool) of the plan's tokens, or None.

        Raises EngineError where an item's output is needed and is not there.
        """
        pieces = list(self._pieces(plan))
        if not pieces:
            return None
        # Encoders may give more than the embedding itself, for layers behind it.
        width, dtype = max(piece.shape[1] for _, piece in pieces), pieces[0][1].dtype
        found = torch.zeros(len(plan.tokens), width, dtype=dtype, device=self._device)
        mask = np.zeros(len(plan.tokens), dtype=bool)
        for place, piece in pieces:
            found[place : place + len(piece), : piece.shape[1]] = piece
            mask[place : place + len(piece)] = True
        return found, torch.from_numpy(mask).to(self._device)

    def _pieces(self, plan: Plan) -> Iterator[tuple[int, torch.Tensor]]:
        """(place in the step, embeddings) of every run of tokens that embeddings replace."""
        firsts = np.cumsum(plan.counts) - plan.counts
        for i, row in enumerate(plan.rows.tolist()):
            brought = self._rows.get(row)
            if brought is None:
                continue
            start, count = int(plan.starts[i]), int(plan.counts[i])
            for index, item in enumerate(brought.media):
                if item.cross:
                    continue
                begin, end = max(start, item.start), min(start + count, item.start + item.length)
                if begin < end:
                    output = self._output(item) if item.encoded else brought.embeds[index]
                    yield (
                        int(firsts[i]) + begin - start,
                        output[begin - item.start : end - item.start],
                    )

    def _output(self, item: MediaItem) -> torch.Tensor:
        output = self._outputs.get(item.hash)
        if output is None and item.hash in self._broken:
            raise self._broken[item.hash]
        if output is None:
            raise EngineError(f"an item of kind {item.kind!r} was needed before it was encoded")
        return output

    def axis_positions(self, plan: Plan) -> np.ndarray | None:
        """[axes, tokens] int64 for a model that has several axes, else None.

        Past its prompt a row goes on alike on all axes, `position_offset` further.
        """
        axes = self._model.axes
        if axes == 1 or not self._rows:
            return None
        firsts = np.cumsum(plan.counts) - plan.counts
        positions = np.arange(len(plan.tokens)) + np.repeat(plan.starts - firsts, plan.counts)
        found = np.repeat(positions[None], axes, axis=0)
        for i, row in enumerate(plan.rows.tolist()):
            brought = self._rows.get(row)
            if brought is None or brought.positions is None:
                continue
            first, count = int(firsts[i]), int(plan.counts[i])
            own = positions[first : first + count]
            known = int(np.count_nonzero(own < brought.positions.shape[1]))
            found[:, first : first + known] = brought.positions[:, own[:known]]
            found[:, first + known : first + count] += brought.offset
        return found
