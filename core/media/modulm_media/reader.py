"""Prompts with media: placeholders become tokens, media become items of the prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from attrs import evolve, frozen

from modulm.contracts.media import MediaItem
from modulm.errors import PluginNotFound, RequestError
from modulm_media.cache import ProcessedCache
from modulm_media.family import MediaFamily, Processed
from modulm_media.flags import MediaConfig
from modulm_media.processors import load_processor
from modulm_media.values import KINDS, Media, fingerprint

if TYPE_CHECKING:
    from modulm.engine.types.engine_info import EngineInfo
    from modulm.plugins.manager import PluginManager
    from modulm.text.tokenizer import Tokenizer

__all__ = ["MediaPrompt", "MediaReader", "most_of"]

#: Most media of a kind in a prompt where nothing else is said.
_MOST = 999


@frozen(eq=False)
class MediaPrompt:
    """A prompt whose placeholders are filled: tokens [n] int64, items in the order of their places,
    positions and offset as `modulm.contracts.requests.Request` has them.
    """

    tokens: np.ndarray
    items: tuple[MediaItem, ...]
    positions: np.ndarray | None = None
    offset: int = 0


class MediaReader:
    """Reads the prompts of one engine. The processor is made when the first needs it."""

    def __init__(
        self, family: type[MediaFamily], info: EngineInfo, tokenizer: Tokenizer | None
    ) -> None:
        self._family_class, self._info, self._tokenizer = family, info, tokenizer
        self.flags = info.config.group(MediaConfig)
        self._cache = ProcessedCache(int(self.flags.mm_processor_cache_gb * 2**30))

    @classmethod
    def open(
        cls, info: EngineInfo, tokenizer: Tokenizer | None, plugins: PluginManager
    ) -> Self | None:
        """The reader for an engine's prompts, None if its model takes no media."""
        try:
            family = plugins.load("media_families", info.architecture)
        except PluginNotFound:
            return None
        return cls(family, info, tokenizer)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of media that prompts may have."""
        kinds = self._family_class.kinds
        return tuple(kind for kind in kinds if most_of(self.flags, kind))

    @cached_property
    def family(self) -> MediaFamily:
        """How the architecture's prompts take media, with the checkpoint's processor.

        Raises CheckpointError where that cannot be made.
        """
        model, path = self._info.config.model, self._info.path
        processor = load_processor(path, model.tokenizer or path, model.trust_remote_code)
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        return self._family_class(processor, config)

    def mark(self, kind: str) -> str:
        """What stands for an item of this kind in the text of a prompt."""
        self.check({kind: 1})
        return self.family.mark(kind)

    def check(self, counts: Mapping[str, int]) -> None:
        """Raise RequestError for kinds that the model does not take, and for too many of one."""
        for kind, count in counts.items():
            if kind not in self._family_class.kinds:
                taken = ", ".join(self._family_class.kinds)
                raise RequestError(f"the model takes no {kind}: it takes {taken}", kind)
            most = most_of(self.flags, kind)
            if count > most:
                raise RequestError(
                    f"{count} {kind} items in a prompt: at most {most} (--limit-mm-per-prompt)",
                    kind,
                )

    def read(
        self,
        tokens: Sequence[int] | np.ndarray,
        media: Sequence[Media],
        options: Mapping[str, Any] | None = None,
    ) -> MediaPrompt:
        """The prompt with its placeholders filled; media of one kind in the order of their places.

        options: keywords for the processor, beside those of --mm-processor-kwargs. Raises
        RequestError that names the field to blame.
        """
        counts = {kind: sum(m.kind == kind for m in media) for kind in KINDS}
        self.check({kind: count for kind, count in counts.items() if count})
        keywords = {**self.flags.mm_processor_kwargs, **(options or {})}
        given = np.asarray(tokens, dtype=np.int64)
        pieces: list[np.ndarray] = []
        items: list[MediaItem] = []
        placed: list[tuple[int, Processed]] = []
        length = last = 0
        for at, end, one in self._places(given, media, keywords):
            processed, digest = one
            before, rest = given[last:at], end
            if not np.array_equal(given[at:end], processed.tokens):
                before, processed, rest = self._joined(before, processed, given, end)
            length += len(before)
            pieces += [before, processed.tokens]
            placed.append((length, processed))
            items.append(_item(processed, length, digest))
            length += len(processed.tokens)
            last = rest
        found = np.concatenate([*pieces, given[last:]])
        positions = self.family.positions(found, placed)
        offset = 0 if positions is None else int(positions.max()) + 1 - len(found)
        return MediaPrompt(found, tuple(items), positions, offset)

    def _places(
        self, tokens: np.ndarray, media: Sequence[Media], options: Mapping[str, Any]
    ) -> list[tuple[int, int, tuple[Processed, bytes]]]:
        """(first, end, what stands there) of every placeholder, in order."""
        places: list[tuple[int, int, tuple[Processed, bytes]]] = []
        for kind in dict.fromkeys(m.kind for m in media):
            own = [self._processed(m, options) for m in media if m.kind == kind]
            mark = self.family.mark(kind)
            spans = _found(tokens, self._encoded(mark), own)
            if spans is None:
                count = _count(tokens, self._encoded(mark))
                raise RequestError(
                    f"the prompt has {count} placeholders {mark!r} for {len(own)} {kind} items",
                    "prompt",
                )
            places += [(a, b, one) for (a, b), one in zip(spans, own, strict=True)]
        return sorted(places, key=lambda place: place[0])

    def _joined(
        self, before: np.ndarray, item: Processed, given: np.ndarray, end: int
    ) -> tuple[np.ndarray, Processed, int]:
        """(tokens before the item, the item, where text goes on), with tokens merged where they
        meet; given[end:] is the text behind it.
        """
        tokens = item.tokens
        if len(before) and not item.embedded[0]:
            one = self.family.merged(int(before[-1]), int(tokens[0]))
            if one is not None:
                before, tokens = before[:-1], np.concatenate([[one], tokens[1:]])
        if end < len(given) and not item.embedded[-1]:
            one = self.family.merged(int(tokens[-1]), int(given[end]))
            if one is not None:
                end, tokens = end + 1, np.concatenate([tokens[:-1], [one]])
        return before, evolve(item, tokens=tokens), end

    def _encoded(self, mark: str) -> np.ndarray:
        tokenizer = self._tokenizer
        if tokenizer is not None:
            return np.array(tokenizer.encode(mark, add_special_tokens=False), dtype=np.int64)
        inner = self.family.processor.tokenizer
        return np.array(inner.encode(mark, add_special_tokens=False), dtype=np.int64)

    def _processed(self, media: Media, options: Mapping[str, Any]) -> tuple[Processed, bytes]:
        """What the processor makes of an item, and the name of that."""
        key = fingerprint(media.hash, dict(options), type(self.family).__name__)
        found = self._cache.get(key)
        if found is None:
            if media.value is None:
                raise RequestError(
                    f"no {media.kind} of uuid {media.uuid!r:.80} is kept: send its data again",
                    "multi_modal_uuids",
                )
            found = self.family.process(media, options)
            self._cache.put(key, found)
        return found, key


def most_of(flags: MediaConfig, kind: str) -> int:
    """How many media of a kind one prompt may have."""
    if flags.language_model_only:
        return 0
    given = flags.limit_mm_per_prompt.get(kind, _MOST)
    return int(given["count"] if isinstance(given, Mapping) else given)


def _item(processed: Processed, start: int, digest: bytes) -> MediaItem:
    """The item that reaches from the first token with an embedding to the last.

    Where others stand between them, it says which are which.
    """
    inside = np.flatnonzero(processed.embedded)
    if not len(inside):
        raise RequestError(f"nothing is left of the {processed.kind}", "multi_modal_data")
    first, end = int(inside[0]), int(inside[-1]) + 1
    tensors = dict(processed.tensors)
    if len(inside) < end - first:
        tensors["item_tokens"] = processed.tokens[first:end]
        tensors["item_embedded"] = processed.embedded[first:end]
    spans = tuple((start + a, start + b) for a, b in processed.spans)
    return MediaItem(processed.kind, digest, start + first, end - first, tensors, spans)


def _found(
    tokens: np.ndarray, mark: np.ndarray, items: Sequence[tuple[Processed, bytes]]
) -> list[tuple[int, int]] | None:
    """(first, end) of each item's placeholder, or of the tokens that already stand for it; None
    where there are not as many.
    """
    spans: list[tuple[int, int]] = []
    at = 0
    for processed, _ in items:
        whole = processed.tokens
        starts = _starts(tokens[at:], mark)
        if not len(starts):
            return None
        first = at + int(starts[0])
        lead = _lead(whole, mark)
        begin = first - lead
        there = begin >= at and np.array_equal(tokens[begin : begin + len(whole)], whole)
        span = (begin, begin + len(whole)) if there else (first, first + len(mark))
        spans.append(span)
        at = span[1]
    return None if len(_starts(tokens[at:], mark)) else spans


def _lead(tokens: np.ndarray, mark: np.ndarray) -> int:
    """How many tokens come before the first mark, 0 if there is none."""
    starts = _starts(tokens, mark)
    return int(starts[0]) if len(starts) else 0


def _starts(tokens: np.ndarray, mark: np.ndarray) -> np.ndarray:
    """Where the mark begins in the tokens."""
    if not len(mark) or len(tokens) < len(mark):
        return np.zeros(0, dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(mark))
    return np.flatnonzero((windows == mark).all(axis=1))


def _count(tokens: np.ndarray, mark: np.ndarray) -> int:
    return len(_starts(tokens, mark))
