"""Encoder budget: which media are encoded in a step, and what is kept of what encoders gave.

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

from modulm.contracts.executor import Capacity
from modulm.contracts.media import MediaItem
from modulm.contracts.requests import Request
from modulm.engine.scheduling.limits import Limits
from modulm.errors import RequestError

__all__ = ["EncoderBudget"]


class EncoderBudget:
    """rows: row -> the media of its prompt, of rows that may still come upon some."""

    def __init__(self, capacity: Capacity, limits: Limits, unit: int) -> None:
        self.rows: dict[int, tuple[MediaItem, ...]] = {}
        self._per_step = capacity.encoder_tokens
        self._room = capacity.encoder_cache
        self._whole = not limits.chunked
        self._rows_of_piece = 0 if self._whole else limits.encoder_rows
        self._whole_media = limits.whole_media
        chunk = min(limits.tokens, limits.long or limits.tokens)
        #: Most tokens that surely fit into one chunk, which ends at a multiple of `unit`.
        self._chunk = max(chunk - (unit if unit > 1 else 0), 0)
        #: Hash -> embeddings, of what the worker keeps; least recently used first.
        self._kept: dict[bytes, int] = {}
        self._lost: list[bytes] = []
        #: Hash -> the step that began with it, of items of which pieces are left.
        self._begun: dict[bytes, int] = {}
        #: Whether the step that is being planned encodes in pieces.
        self.in_pieces = False
        #: Of the step that is being planned: hash -> (row, index of the item, embeddings) of what
        #: is encoded, and hash -> embeddings of all that it uses.
        self._picked: dict[bytes, tuple[int, int, int]] = {}
        self._used: dict[bytes, int] = {}
        self._left = self._per_step

    @property
    def enabled(self) -> bool:
        """Whether the model has encoders."""
        return self._per_step > 0

    def check(self, request: Request) -> None:
        """Raise RequestError for media that could never be encoded."""
        most = min(self._per_step, self._room)
        lengths = [item.length for item in request.media if item.encoded]
        if lengths and not most:
            raise RequestError("the model takes no media", "prompt")
        needed = sum(lengths) if self._whole else max(lengths, default=0)
        if needed > most:
            raise RequestError(f"media of {needed} tokens: an encoder step takes {most}", "prompt")
        spans = [span for item in request.media for span in self._spans(item)]
        longest = max((end - first for first, end in spans), default=0)
        if longest > self._chunk:
            raise RequestError(
                f"media that take {longest} tokens at once: a step takes {self._chunk}", "prompt"
            )

    def begin(self, computed: np.ndarray, decoding: bool) -> None:
        """A step is planned (anew); computed: per row of the table; decoding: whether rows in it
        decode.
        """
        self.in_pieces = decoding and self._rows_of_piece > 0
        self._picked.clear()
        self._left = self._per_step
        self._used = {
            item.hash: item.length
            for row, media in self.rows.items()
            for item in media
            if item.start < computed[row] < item.end and item.hash in self._kept
        } | {hashed: self._kept[hashed] for hashed in self._begun}

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
            fresh = 0 if item.hash in self._kept else item.length
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

    def pick(self, row: int, start: int, count: int, picks: Sequence[int]) -> None:
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

    def admit(self, row: int, media: tuple[MediaItem, ...]) -> None:
        """A request with media got a row."""
        self.rows[row] = media

    def release(self, row: int) -> None:
        """The row is gone, or past its media."""
        self.rows.pop(row, None)

    def plan(self, step: int) -> tuple[tuple[tuple[int, int], ...], int, tuple[bytes, ...]]:
        """What the step encodes, `Plan.encode_rows`, and what it drops."""
        self._forsake()
        for hashed in self._used.keys() & self._kept.keys():
            self._kept[hashed] = self._kept.pop(hashed)
        dropped, self._lost = self._lost, []
        over = sum(self._kept.values()) - self._room
        over += sum(length for _, _, length in self._picked.values())
        for hashed in [hashed for hashed in self._kept if hashed not in self._used]:
            if over <= 0:
                break
            over -= self._kept.pop(hashed)
            dropped.append(hashed)
        self._kept |= {hashed: length for hashed, (_, _, length) in self._picked.items()}
        encode = tuple((row, index) for row, index, _ in self._picked.values())
        self._begun = self._begun | dict.fromkeys(self._picked, step) if self.in_pieces else {}
        self._picked.clear()
        return encode, self._rows_of_piece if self._begun else 0, tuple(dropped)

    def _forsake(self) -> None:
        """Lose what was begun for rows that are gone."""
        wanted = self._begun and {item.hash for media in self.rows.values() for item in media}
        for hashed in [hashed for hashed in self._begun if hashed not in wanted]:
            del self._begun[hashed], self._kept[hashed], self._used[hashed]
            self._lost.append(hashed)

    def finished(self, step: int, hashes: Sequence[bytes]) -> None:
        """The last pieces of these were done in this step."""
        for hashed in hashes:
            # It may have been dropped since, and begun once more.
            if self._begun.get(hashed, step + 1) <= step:
                del self._begun[hashed]

    def fail(self) -> None:
        """A step failed: what it encoded may be missing."""
        self._lost += self._kept
        self._kept.clear()
        self._begun.clear()

    @property
    def kept(self) -> Mapping[bytes, int]:
        """Hash -> embeddings of what is kept."""
        return self._kept
