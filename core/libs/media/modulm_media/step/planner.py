"""The scheduler's half: which media are encoded in a step, and which encoder outputs are kept.

A chunk of a prompt may reach into the tokens of an item once its embeddings are there, from an
earlier step or from this one. Items of equal hash are encoded once. A row needs the embeddings of
an item from its first token to its last; those that nobody needs are dropped when room is, least
recently used first. A row that waits for room holds none, so somebody always goes on.

While rows decode, items are encoded in pieces, each in a step of theirs: a row waits before an
item until its last piece is done. Where nobody decodes, what was begun is finished at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from modulm.contracts.executor import PartReport, Plan
from modulm.contracts.media import MediaItem
from modulm.contracts.requests import Request
from modulm.contracts.step_part import PartPlanner, PlannerContext, StepDraft, WaitingRequest
from modulm.errors import RequestError
from modulm_media.step.values import EncodePlan, MediaRow

__all__ = ["EncoderPlanner", "NoEncoders"]


def _row_value(request: Request) -> MediaRow | None:
    if not request.media and request.positions is None:
        return None
    return MediaRow(request.media, request.positions, request.position_offset)


class NoEncoders(PartPlanner):
    """Of a model without encoders: prompts may bring embeddings, and nothing else."""

    def check(self, request: Request) -> None:
        if any(item.encoded for item in request.media):
            raise RequestError("the model takes no media", "prompt")

    def row_value(self, request: Request) -> MediaRow | None:
        return _row_value(request)


class EncoderPlanner(PartPlanner):
    """Plans encoders within what the runner says of its capacity.

    tokens: embeddings that encoders may give in one step; cache: those that are kept at once; rows:
    rows (patches, frames) times layers of encoders that run in a step in which rows decode, 0:
    encoders run whole; whole: no chunk of a prompt ends inside of an item.
    """

    def __init__(self, context: PlannerContext) -> None:
        values, limits, unit = context.values, context.limits, context.cache.unit
        self._table = context.rows
        #: Row -> the media of its prompt, of rows that may still come upon some.
        self.rows: dict[int, tuple[MediaItem, ...]] = {}
        self._per_step: int = values["tokens"]
        self._room: int = values["cache"]
        self._whole = not limits.chunked
        self._rows_of_piece: int = 0 if self._whole else values["rows"]
        self._whole_media: bool = values["whole"]
        chunk = min(limits.tokens, limits.long or limits.tokens)
        #: Most tokens that surely fit into one chunk, which ends at a multiple of `unit`.
        self._chunk = max(chunk - (unit if unit > 1 else 0), 0)
        #: Hash -> embeddings, of what the worker keeps; least recently used first.
        self._cached: dict[bytes, int] = {}
        self._dropped: list[bytes] = []
        #: Hash -> the step that began with it, of items of which pieces are left.
        self._begun: dict[bytes, int] = {}
        #: Whether the step that is being planned encodes in pieces.
        self.in_pieces = False
        #: Of the step that is being planned: hash -> (row, index of the item, embeddings) of what
        #: is encoded, and hash -> embeddings of all that it uses.
        self._picked: dict[bytes, tuple[int, int, int]] = {}
        self._used: dict[bytes, int] = {}
        self._left = self._per_step
        #: Items of the request that is about to join that are encoded for it.
        self._picks: list[int] = []

    def check(self, request: Request) -> None:
        """Raise RequestError for media that could never be encoded."""
        most = min(self._per_step, self._room)
        lengths = [item.length for item in request.media if item.encoded]
        needed = sum(lengths) if self._whole else max(lengths, default=0)
        if needed > most:
            raise RequestError(f"media of {needed} tokens: an encoder step takes {most}", "prompt")
        spans = [span for item in request.media for span in self._spans(item)]
        longest = max((end - first for first, end in spans), default=0)
        if longest > self._chunk:
            raise RequestError(
                f"media that take {longest} tokens at once: a step takes {self._chunk}", "prompt"
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
        """A row that waits for a last piece leaves its part of the budget to others."""
        if self.in_pieces:
            self.cut(rows, starts, counts)

    def cut(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """Rows end before media that cannot be encoded in this step."""
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
        """How many of the tokens [start, start + count) can be computed in this step, and which
        items are encoded for it.
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
        """Whether the item's last piece will not be done before this step's tokens."""
        return self.in_pieces and (item.hash in self._begun or item.hash in self._picked)

    def _uncut(self, media: Sequence[MediaItem], start: int, end: int) -> int:
        """Where tokens [start, end) have to end, so that nothing whole is cut."""
        for item in reversed(media):
            for first, last in self._spans(item):
                if first < end < last and end > start:
                    end = max(first, start)
        return end

    def _spans(self, item: MediaItem) -> tuple[tuple[int, int], ...]:
        """What of the item's tokens no step cuts."""
        return ((item.start, item.end),) if self._whole_media and item.encoded else item.spans

    def _pick(self, row: int, start: int, count: int, picks: Sequence[int]) -> None:
        """The row computes these tokens, for which `picks` of its items are encoded."""
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
        """Drop what was begun for rows that are gone."""
        wanted = self._begun and {item.hash for media in self.rows.values() for item in media}
        for digest in [digest for digest in self._begun if digest not in wanted]:
            del self._begun[digest], self._cached[digest], self._used[digest]
            self._dropped.append(digest)

    def receive(self, plan: Plan, report: PartReport) -> None:
        """The last pieces of some items were done in this step."""
        for digest in report.value:
            # It may have been dropped since, and begun once more.
            if self._begun.get(digest, plan.step + 1) <= plan.step:
                del self._begun[digest]

    def fail(self, plan: Plan) -> None:
        """What the step encoded may be missing."""
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
        """Hash -> embeddings of what the worker keeps."""
        return self._cached
