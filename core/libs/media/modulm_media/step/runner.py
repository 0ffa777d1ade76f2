"""The worker's half: runs encoders and adds embeddings and positions to batches."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from attrs import evolve, frozen

from modulm.contracts.attention import AttentionSpec, StepLayout
from modulm.contracts.executor import Plan, RowStart
from modulm.contracts.media import MediaItem, crossed_runs
from modulm.contracts.model import Batch
from modulm.contracts.step_part import BuiltModel, PartRunner, RunnerContext
from modulm.engine.worker.input_batch import Runs, cross_layout
from modulm.errors import ConfigError, EngineError
from modulm_kv_transfer.encoder_outputs import EncoderOutputs, EncoderTransfer
from modulm_media.flags import MediaConfig
from modulm_media.step.values import EncodePlan, MediaRow

__all__ = ["MediaRunner"]

log = logging.getLogger("modulm.engine")

#: The tensor of an item with the spans of all that it attends to (`MediaFamily.together`).
_TOGETHER = "item_together"
#: Seconds that a step without rows waits while requests wait for encoder outputs of other hosts.
_PAUSE = 0.002

Pieces: TypeAlias = Generator[int, None, Sequence[torch.Tensor]]


@frozen(eq=False)
class _PromptParts:
    """The media parts of a row's prompt.

    embeds: index of an item -> its precomputed embeddings, [tokens, hidden]. positions: [axes,
    tokens], of the prompt. runs: see `Runs`.
    """

    media: tuple[MediaItem, ...]
    embeds: Mapping[int, torch.Tensor]
    positions: np.ndarray | None
    offset: int
    runs: Runs


class MediaRunner(PartRunner):
    """Runs the encoders that plans name, caches their outputs by hash, and adds them to batches.

    Rows without media cost nothing: they are not tracked. stored, transfer: encoder outputs outside
    the engine, and what they are for.
    """

    def __init__(
        self,
        built: BuiltModel,
        stored: EncoderOutputs | None = None,
        transfer: EncoderTransfer | None = None,
    ) -> None:
        self._mesh = built.mesh
        self._source = stored if transfer is not None and transfer.consumes else None
        self._target = stored if transfer is not None and transfer.produces else None
        self._model = built.loaded.model
        self._groups = built.loaded.groups
        self._scheduler = built.config.scheduler
        rate = built.config.group(MediaConfig).video_pruning_rate
        if rate and not getattr(self._model, "prunes_videos", False):
            raise ConfigError(
                "video_pruning_rate",
                f"{type(self._model).__name__} leaves out no tokens of videos; Qwen2-VL and "
                "Qwen2.5-VL do",
            )
        self._device = built.platform.device
        self._focus: Callable[[Any, Any], None] = lambda rows, positions: None
        self._rows: dict[int, _PromptParts] = {}
        self._outputs: dict[bytes, torch.Tensor] = {}
        self._broken: dict[bytes, Exception] = {}
        #: Hash -> the item and its running encoder, for items with pieces left.
        self.begun: dict[bytes, tuple[MediaItem, Pieces]] = {}
        specs = [cache.spec for cache in self._model.caches]
        self._crosses = any(isinstance(spec, AttentionSpec) and spec.cross for spec in specs)

    def capacity(self) -> Mapping[str, Any]:
        """Return the limits. Items are encoded whole, so the cache holds what one step encodes."""
        if not self._model.media:
            return {}
        cross = (group.window or 0 for group in self._groups if group.kind == "cross")
        tokens = max(self._scheduler.max_num_batched_tokens or 0, *cross, 0)
        return {
            "tokens": tokens,
            "cache": tokens,
            "rows": self._scheduler.mm_encoder_chunk,
            "whole": self._scheduler.disable_chunked_mm_input,
        }

    def open(self, context: RunnerContext) -> None:
        self._focus = context.focus

    def admit(self, start: RowStart, value: MediaRow | None) -> None:
        """Start a row. Rows without media are not tracked."""
        if value is None:
            return
        embeds = {
            index: torch.from_numpy(np.array(item.tensors["embeds"])).to(self._device)
            for index, item in enumerate(value.items)
            if not item.encoded
        }
        runs = [[(i.seen, i.length) for i in run] for run in crossed_runs(value.items)]
        self._rows[start.row] = _PromptParts(
            value.items, embeds, value.positions, value.offset, runs
        )

    def release(self, row: int) -> None:
        """Forget the row. Encoder outputs stay until the planner drops them."""
        self._rows.pop(row, None)

    def begin(self, plan: Plan, value: EncodePlan | None) -> tuple[bytes, ...] | None:
        """Drop and encode what the plan says; returns hashes of items whose last piece is done.

        Raises EngineError for an encoder's wrong output.
        """
        if value is None and not self.begun:
            return None
        if value is not None and not len(plan.rows):
            time.sleep(_PAUSE)
        value = value or EncodePlan()
        self._focus(None, None)
        for digest in value.drop:
            for held in (self._outputs, self._broken, self.begun):
                held.pop(digest, None)
        items = {
            item.hash: item
            for row, index in value.items
            if (item := self._rows[row].media[index]).hash not in self._outputs
        }
        loaded = self._load(tuple(items.values())) if items and self._source is not None else ()
        for digest in loaded:
            del items[digest]
        if value.rows:
            pieces = self._model.encode_in_pieces
            self.begun |= {digest: (item, pieces((item,))) for digest, item in items.items()}
        elif items:
            self._keep(tuple(items.values()), self._model.encode(tuple(items.values())))
        return (*loaded, *self._go_on(value.rows or math.inf)) or None

    def _load(self, items: Sequence[MediaItem]) -> tuple[bytes, ...]:
        """Load the outputs that all ranks have; return the hashes of their items."""
        source = self._source
        outputs = [None if source is None else source.load(item.hash) for item in items]
        found = torch.tensor(
            [o is not None and len(o) == i.length for i, o in zip(items, outputs, strict=True)],
            dtype=torch.int64, device=self._device,
        )  # fmt: skip
        world = self._mesh.world
        everywhere = world.all_reduce(found).tolist() if world.size > 1 else found.tolist()
        loaded = []
        for item, output, ranks in zip(items, outputs, everywhere, strict=True):
            if output is not None and ranks == world.size:
                self._outputs[item.hash] = output.to(self._device)
                loaded.append(item.hash)
        return tuple(loaded)

    def _store(self, item: MediaItem) -> None:
        """Store an output for other engines, on the first rank."""
        if self._target is None or self._mesh.world.rank:
            return
        try:
            self._target.save(item.hash, self._outputs[item.hash])
        except OSError as error:
            log.warning("an encoder output could not be stored: %s", error)

    def amend_layout(self, plan: Plan, spec: AttentionSpec, layout: StepLayout) -> StepLayout:
        if not self._rows:
            return layout
        if spec.cross:
            rows = map(self._rows.get, plan.rows.tolist())
            runs = [() if brought is None else brought.runs for brought in rows]
            return cross_layout(plan, layout.block_tables, layout.block_size, runs)
        if spec.spans and (spans := self.spans(plan)) is not None:
            layout = evolve(layout, spans=spans)
        if spec.masks and (masks := self.masks(plan)):
            layout = evolve(layout, masks={**(layout.masks or {}), **masks})
        return layout

    def _go_on(self, rows: float) -> Iterator[bytes]:
        """Run pieces until `rows` encoder rows are done; yields hashes of finished items."""
        while self.begun and rows > 0:
            digest, (item, pieces) = next(iter(self.begun.items()))
            try:
                ran = self._piece(item, pieces)
            except Exception as error:  # raised in the step that needs the item, not in this one
                self._broken[digest], ran = error, 0
            rows -= ran
            if not ran:
                del self.begun[digest]
                yield digest

    def _piece(self, item: MediaItem, pieces: Pieces) -> int:
        """Run one piece; returns its encoder rows. 0: it was the last, and its output is cached."""
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
                    f"with {item.length} tokens"
                )
            # Encoder outputs may be views of one large tensor, which would stay allocated.
            self._outputs[item.hash] = output.clone()
            self._store(item)

    def spans(self, plan: Plan) -> np.ndarray | None:
        """Return `StepLayout.spans`, [n, 3] int32, of the items that end in the plan's tokens. An
        item may begin in a cached prefix.
        """
        if not self._rows:
            return None
        spans = [
            (index, first, end)
            for index, row in enumerate(plan.rows.tolist())
            if row in self._rows
            for item in self._rows[row].media
            if _TOGETHER not in item.tensors
            for first, end in item.spans
            if plan.starts[index] < end <= plan.starts[index] + plan.counts[index]
        ]
        return np.array(spans, dtype=np.int32) if spans else None

    def masks(self, plan: Plan) -> dict[int, np.ndarray]:
        """Return `StepLayout.masks` of rows with items that attend to each other across text."""
        masks = {}
        ranges = zip(plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True)
        for index, (row, start, count) in enumerate(ranges):
            for item in self._rows[row].media if row in self._rows else ():
                if _TOGETHER in item.tensors and start < item.end <= start + count:
                    inside = np.zeros(count, dtype=bool)
                    for first, end in item.tensors[_TOGETHER].tolist():
                        inside[max(first - start, 0) : max(end - start, 0)] = True
                    masks[index] = np.tri(count, dtype=bool) | (inside[:, None] & inside)
        return masks

    def encoded(self, plan: Plan) -> torch.Tensor | None:
        """Return `Batch.encoded`: [n, width] of rows that begin in this step; None without any.

        Raises EngineError if an output that an item needs is missing.
        """
        if not self._crosses:
            return None
        outputs = [
            self._output(item)
            for row, start in zip(plan.rows.tolist(), plan.starts.tolist(), strict=True)
            if start == 0 and row in self._rows
            for item in self._rows[row].media
            if item.cross
        ]
        return torch.cat(outputs) if outputs else None

    def amend_batch(self, plan: Plan, batch: Batch) -> Batch:
        if not self._rows:
            return batch
        batch = evolve(batch, encoded=self.encoded(plan))
        replaced = self.embeds(plan)
        if replaced is not None:
            batch = evolve(batch, embeds=replaced[0], embeds_mask=replaced[1])
        positions = self.axis_positions(plan)
        if positions is None:
            return batch
        on_axes = torch.from_numpy(positions).to(self._device)
        if (positions == positions[0]).all():
            # After a row's media all axes count alike, so the step is an ordinary one.
            return evolve(batch, positions=on_axes[0])
        return evolve(batch, axis_positions=on_axes)

    def embeds(self, plan: Plan) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return (embeddings [tokens, hidden], mask [tokens] bool) of the plan's tokens, or None.

        Raises EngineError if an output that an item needs is missing.
        """
        pieces = list(self._pieces(plan))
        if not pieces:
            return None
        # Outputs may be wider than the embedding, with inputs for further layers.
        width, dtype = max(piece.shape[1] for _, piece in pieces), pieces[0][1].dtype
        embeddings = torch.zeros(len(plan.tokens), width, dtype=dtype, device=self._device)
        mask = np.zeros(len(plan.tokens), dtype=bool)
        for start, piece in pieces:
            embeddings[start : start + len(piece), : piece.shape[1]] = piece
            mask[start : start + len(piece)] = True
        return embeddings, torch.from_numpy(mask).to(self._device)

    def _pieces(self, plan: Plan) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index in the step, embeddings) of every run of tokens that embeddings replace."""
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
        """Return [axes, tokens] int64 for a model with several position axes, else None.

        After its prompt, all axes of a row continue alike, shifted by `position_offset`.
        """
        axes = self._model.axes
        if axes == 1 or not self._rows:
            return None
        firsts = np.cumsum(plan.counts) - plan.counts
        positions = np.arange(len(plan.tokens)) + np.repeat(plan.starts - firsts, plan.counts)
        result = np.repeat(positions[None], axes, axis=0)
        for i, row in enumerate(plan.rows.tolist()):
            brought = self._rows.get(row)
            if brought is None or brought.positions is None:
                continue
            first, count = int(firsts[i]), int(plan.counts[i])
            row_positions = positions[first : first + count]
            stored = int(np.count_nonzero(row_positions < brought.positions.shape[1]))
            result[:, first : first + stored] = brought.positions[:, row_positions[:stored]]
            result[:, first + stored : first + count] += brought.offset
        return result
