"""The scheduler's half: which media are encoded in a step, and which encoder outputs are cached.

A prompt chunk may include tokens of an item only if its embeddings are ready, from an earlier step
or this one. Items of equal hash are encoded once. A row needs an item's embeddings from its first
token to its last; embeddings that no row needs are evicted when space is needed, least recently
used first. A row that waits for space holds none, so there is always a row that can continue.

While rows decode, items are encoded in pieces, one per step; a row stops before an item until its
last piece is done. While no row decodes, items are encoded whole, begun ones included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from modulm.contracts.executor import PartReport, Plan
from modulm.contracts.media import MediaItem
from modulm.contracts.requests import Request
from modulm.contracts.step_part import PartPlanner, PlannerContext, StepDraft, WaitingRequest
from modulm.errors import RequestError
from modulm_kv_transfer.encoder_outputs import EncoderOutputs
from modulm_media.step.values import EncodePlan, MediaRow

__all__ = ["EncoderPlanner", "FetchingPlanner", "NoEncoders"]


def _row_value(request: Request) -> MediaRow | None:
    if not request.media and request.positions is None:
        return None
    return MediaRow(request.media, request.positions, request.position_offset)


class NoEncoders(PartPlanner):
    """Planner of a model without encoders: prompts may only bring embeddings."""

    def check(self, request: Request) -> None:
        if any(item.encoded for item in request.media):
            raise RequestError("the model does not support media", "prompt")

    def row_value(self, request: Request) -> MediaRow | None:
        return _row_value(request)


class EncoderPlanner(PartPlanner):
    """Plans encoder work within the runner's capacity.

    tokens: maximum embeddings per step. cache: maximum embeddings cached. rows: budget of encoder
    rows (patches, frames) times layers in steps with decode rows; 0: encoders run whole. whole:
    prompt chunks never end inside an item.
    """

    def __init__(self, context: PlannerContext) -> None:
        values, limits, unit = context.values, context.limits, context.cache.unit
        self._table = context.rows
        #: Row -> the media of its prompt, for rows that may still reach some.
        self.rows: dict[int, tuple[MediaItem, ...]] = {}
        self._per_step: int = values["tokens"]
        self._room: int = values["cache"]
        self._whole = not limits.chunked
        self._rows_of_piece: int = 0 if self._whole else values["rows"]
        self._whole_media: bool = values["whole"]
        chunk = min(limits.tokens, limits.long or limits.tokens)
        #: Maximum tokens that surely fit into one chunk, which ends at a multiple of `unit`.
        self._chunk = max(chunk - (unit if unit > 1 else 0), 0)
        #: Hash -> number of embeddings, for the worker's cached items; least recently used first.
        self._cached: dict[bytes, int] = {}
        self._dropped: list[bytes] = []
        #: Hash -> the step that began encoding it, for items with pieces left.
        self._begun: dict[bytes, int] = {}
        #: Whether the step being planned encodes in pieces.
        self.in_pieces = False
        #: For the step being planned: hash -> (row, index of the item, embeddings) of items to
        #: encode, and hash -> embeddings of all items used.
        self._picked: dict[bytes, tuple[int, int, int]] = {}
        self._used: dict[bytes, int] = {}
        self._left = self._per_step
        #: Items of the joining request that are encoded for it.
        self._picks: list[int] = []

    def check(self, request: Request) -> None:
        """Raise RequestError for media that can never be encoded."""
        most = min(self._per_step, self._room)
        lengths = [item.length for item in request.media if item.encoded]
        needed = sum(lengths) if self._whole else max(lengths, default=0)
        if needed > most:
            raise RequestError(
                f"media of {needed} tokens, but an encoder step takes at most {most}", "prompt"
            )
        spans = [span for item in request.media for span in self._spans(item)]
        longest = max((end - first for first, end in spans), default=0)
        if longest > self._chunk:
            raise RequestError(
                f"media that take {longest} tokens at once, but a step takes at most {self._chunk}",
                "prompt",
            )

    def begin(self, decoding: bool) -> None:
        computed = self._table.computed
        self.in_pieces = decoding and self._rows_of_piece > 0
        self._picked.clear()
        self._left = self._per_step
        self._used = {
            item.hash: item.length
            for row, media in self.rows.items()
            for item in media
            if item.start < computed[row] < item.end and item.hash in self._cached
        } | {digest: self._cached[digest] for digest in self._begun}

    def claim(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """Leave the budget of a row that waits for a last piece to other rows."""
        if self.in_pieces:
            self.cut(rows, starts, counts)

    def cut(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """Cut rows before media that cannot be encoded in this step."""
        if not self.rows:
            return
        for index in np.isin(rows, list(self.rows)).nonzero()[0].tolist():
            row, start, count = int(rows[index]), int(starts[index]), int(counts[index])
            fitting, picks = self.fit(self.rows[row], start, count)
            counts[index] = fitting
            self._pick(row, start, fitting, picks)

    def limit(self, request: Request, start: int, count: int) -> int:
        self._picks = []
        if not request.media:
            return count
        fitting, self._picks = self.fit(request.media, start, count)
        return fitting if not self._whole or fitting == count else 0

    def waits_in_row(self, request: Request) -> bool:
        return bool(request.media) and self.in_pieces

    def joined(self, request: Request, row: int, start: int, count: int) -> None:
        if request.media:
            self._pick(row, start, count, self._picks)

    def fit(self, media: Sequence[MediaItem], start: int, count: int) -> tuple[int, list[int]]:
        """Return how many of the tokens [start, start + count) can be computed in this step, and
        which items are encoded for it.
        """
        end, left = start + count, self._left
        chosen: dict[bytes, int] = {}
        using = dict(self._used)
        for index, item in enumerate(media):
            if item.start >= end:
                break
            waits = self._waits(item)
            if item.end <= start or (item.hash in using and not waits) or not item.encoded:
                continue
            fresh = 0 if item.hash in self._cached else item.length
            if waits or fresh > left or sum(using.values()) + item.length > self._room:
                end = max(item.start, start)
                break
            using[item.hash] = item.length
            if fresh:
                left -= fresh
                chosen[item.hash] = index
                if self.in_pieces:
                    end = max(item.start, start)
                    break
        end = self._uncut(media, start, end)
        picks = chosen.values()
        return end - start, [i for i in picks if self.in_pieces or media[i].start < end]

    def _waits(self, item: MediaItem) -> bool:
        """Whether the item's last piece will be unfinished when this step runs."""
        return self.in_pieces and (item.hash in self._begun or item.hash in self._picked)

    def _uncut(self, media: Sequence[MediaItem], start: int, end: int) -> int:
        """Return where tokens [start, end) must end so that no indivisible span is cut."""
        for item in reversed(media):
            for first, last in self._spans(item):
                if first < end < last and end > start:
                    end = max(first, start)
        return end

    def _spans(self, item: MediaItem) -> tuple[tuple[int, int], ...]:
        """Spans of the item's tokens that must not be divided between steps."""
        return ((item.start, item.end),) if self._whole_media and item.encoded else item.spans

    def _pick(self, row: int, start: int, count: int, picks: Sequence[int]) -> None:
        """Record that the row computes these tokens, for which its items `picks` are encoded."""
        media = self.rows[row]
        for index in picks:
            self._picked[media[index].hash] = (row, index, media[index].length)
            self._left -= media[index].length
        end = start + count
        self._used |= {
            item.hash: item.length
            for item in media
            if item.encoded and item.start < end and item.end > start
        } | {media[index].hash: media[index].length for index in picks}

    def admit(self, waiting: WaitingRequest, row: int) -> None:
        if waiting.request.media:
            self.rows[row] = waiting.request.media

    def row_value(self, request: Request) -> MediaRow | None:
        return _row_value(request)

    def sampled(self, rows: np.ndarray) -> None:
        if self.rows:
            for row in rows.tolist():
                self.rows.pop(row, None)

    def release(self, request: Request, row: int) -> None:
        self.rows.pop(row, None)

    def plan(self, step: StepDraft, left: int) -> EncodePlan | None:
        if not len(step.rows):
            return None
        self._forsake()
        for digest in self._used.keys() & self._cached.keys():
            self._cached[digest] = self._cached.pop(digest)
        dropped, self._dropped = self._dropped, []
        over = sum(self._cached.values()) - self._room
        over += sum(length for _, _, length in self._picked.values())
        for digest in [digest for digest in self._cached if digest not in self._used]:
            if over <= 0:
                break
            over -= self._cached.pop(digest)
            dropped.append(digest)
        self._cached |= {digest: length for digest, (_, _, length) in self._picked.items()}
        items = tuple((row, index) for row, index, _ in self._picked.values())
        started = dict.fromkeys(self._picked, step.number)
        self._begun = self._begun | started if self.in_pieces else {}
        self._picked.clear()
        rows = self._rows_of_piece if self._begun else 0
        return EncodePlan(items, rows, tuple(dropped)) if items or rows or dropped else None

    def _forsake(self) -> None:
        """Discard unfinished items whose rows are gone."""
        needed = self._begun and {item.hash for media in self.rows.values() for item in media}
        for digest in [digest for digest in self._begun if digest not in needed]:
            del self._begun[digest], self._cached[digest], self._used[digest]
            self._dropped.append(digest)

    def receive(self, plan: Plan, report: PartReport) -> None:
        """Handle the hashes of items whose last piece was done in this step."""
        for digest in report.value:
            # The item may have been dropped and begun again since.
            if self._begun.get(digest, plan.step + 1) <= plan.step:
                del self._begun[digest]

    def fail(self, plan: Plan) -> None:
        """Forget what the step encoded: it may be missing."""
        self._drop_all()

    def forget(self, idle: bool) -> None:
        if idle:
            self._drop_all()
            return
        used = {item.hash for media in self.rows.values() for item in media} | self._begun.keys()
        for digest in [digest for digest in self._cached if digest not in used]:
            del self._cached[digest]
            self._dropped.append(digest)

    def _drop_all(self) -> None:
        self._dropped += self._cached
        self._cached.clear()
        self._begun.clear()

    @property
    def cached(self) -> Mapping[bytes, int]:
        """Hash -> number of embeddings, for the worker's cached items."""
        return self._cached


class FetchingPlanner(EncoderPlanner):
    """Lets requests wait until encoder outputs of other hosts are on this one; others overtake."""

    def __init__(self, context: PlannerContext, outputs: EncoderOutputs) -> None:
        super().__init__(context)
        self._outputs = outputs
        #: Whether a request waited when the step was planned.
        self._deferred = False

    def defers(self, waiting: WaitingRequest, before: Sequence[WaitingRequest]) -> bool:
        request = waiting.request
        items = [i.hash for i in request.media if i.encoded and i.hash not in self._cached]
        if not items or self._outputs.fetch(request.id, items):
            return False
        self._deferred = True
        return True

    def plan(self, step: StepDraft, left: int) -> EncodePlan | None:
        """Return what encoders do. An empty plan lets an idle worker wait for a moment."""
        deferred, self._deferred = self._deferred, False
        if deferred and not len(step.rows):
            return EncodePlan()
        return super().plan(step, left)

    def finished(self, request: str) -> None:
        self._outputs.finish(request)
