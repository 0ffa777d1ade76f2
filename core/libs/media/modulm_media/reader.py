"""Prompts with media: placeholders become tokens, media become items of the prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from attrs import evolve, frozen

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError, PluginNotFound, RequestError
from modulm_media.cache import ProcessedCache
from modulm_media.family import MediaFamily, Processed
from modulm_media.flags import MediaConfig
from modulm_media.processors import ProcessorFiles
from modulm_media.values import KINDS, Media, fingerprint

if TYPE_CHECKING:
    from modulm.contracts.engine_info import EngineInfo
    from modulm.contracts.tokenizer import Tokenizer
    from modulm.plugins.manager import PluginManager

__all__ = ["MediaPrompt", "MediaReader", "load_processor", "most_of"]

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
    """Reads the prompts of one engine. The processor is made when the first needs it.

    opens: the family that makes it, where it is not the one that uses it.
    """

    def __init__(
        self,
        family: type[MediaFamily],
        info: EngineInfo,
        tokenizer: Tokenizer | None,
        opens: type[MediaFamily] | None = None,
    ) -> None:
        self._opens: Any = opens or family  # mypy takes classes not to be hashable
        self._family_class, self._info, self._tokenizer = family, info, tokenizer
        self.flags = info.config.group(MediaConfig)
        self._cache = ProcessedCache(int(self.flags.mm_processor_cache_gb * 2**30))
        # Tokenizers of processors are not safe among threads.
        self._lock = Lock()

    @classmethod
    def open(
        cls, info: EngineInfo, tokenizer: Tokenizer | None, plugins: PluginManager
    ) -> Self | None:
        """The reader for an engine's prompts, None if its model takes no media."""

        def found(name: str) -> type[MediaFamily] | None:
            try:
                family: type[MediaFamily] = plugins.load("media_families", name)
            except PluginNotFound:
                return None
            return family

        own, name = found(info.architecture), info.description.media_family
        family = found(name) if name else own
        return None if family is None else cls(family, info, tokenizer, own)

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
        config = {**_table(path, "generation_config.json"), **_table(path, "config.json")}
        if self._family_class.reads_text:
            return self._family_class(None, config)
        tokenizer = model.tokenizer or path
        processor = load_processor(self._opens, path, tokenizer, model.trust_remote_code)
        return self._family_class(processor, config)

    @property
    def crosses(self) -> bool:
        """Whether a decoder looks at what the encoder gives, and begins with the prompt."""
        return self._family_class.crosses

    @property
    def reads_text(self) -> bool:
        """Whether an encoder reads what prompts say, and a decoder answers."""
        return self._family_class.reads_text

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
        keywords = self._keywords(options)
        if self._family_class.crosses:
            return self._beside(tokens, media, keywords)
        given = np.asarray(tokens, dtype=np.int64)
        for kind in {m.kind for m in media}:
            given = self.family.completed(given, self._encoded(kind))
        if media:
            given, media = self.family.gathered(given, media, keywords)
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
        if self.family.prefix and items:
            items[0] = _leading(found, items)
        positions = self.family.positions(found, placed)
        offset = 0 if positions is None else int(positions.max()) + 1 - len(found)
        return MediaPrompt(found, tuple(items), positions, offset)

    def read_text(
        self, tokens: Sequence[int] | np.ndarray, begun: Sequence[int] | None = None
    ) -> MediaPrompt:
        """The prompt of a decoder whose encoder reads these tokens; begun: what the answer begins
        with, as the model says where it is None. Raises RequestError.
        """
        given = np.asarray(tokens, dtype=np.int64)
        if not len(given) or given.min() < 0 or given.max() >= self._info.vocabulary:
            words = f"prompt: ids from 0 to {self._info.vocabulary - 1} are expected"
            raise RequestError(words, "prompt")
        return self._answering(begun, self.family.text(given), fingerprint("text", given))

    def _beside(
        self, tokens: Sequence[int] | np.ndarray, media: Sequence[Media], options: Mapping[str, Any]
    ) -> MediaPrompt:
        """A prompt with the one item that is encoded for it."""
        if len(media) != 1:
            kinds = " or ".join(self._family_class.kinds)
            words = f"{len(media)} items: the model takes one {kinds} in a prompt"
            raise RequestError(words, "multi_modal_data")
        return self._answering(tokens, *self._processed(media[0], options))

    def _answering(
        self, begun: Sequence[int] | np.ndarray | None, processed: Processed, digest: bytes
    ) -> MediaPrompt:
        first = self.family.start() if begun is None or not len(begun) else begun
        kind, tensors = processed.kind, processed.tensors
        item = MediaItem(kind, digest, 0, processed.given, tensors, cross=True)
        return MediaPrompt(np.asarray(first, dtype=np.int64), (item,))

    def _places(
        self, tokens: np.ndarray, media: Sequence[Media], options: Mapping[str, Any]
    ) -> list[tuple[int, int, tuple[Processed, bytes]]]:
        """(first, end, what stands there) of every placeholder, in order."""
        places: list[tuple[int, int, tuple[Processed, bytes]]] = []
        kinds = tuple(dict.fromkeys(m.kind for m in media))
        for kind in kinds:
            own = [self._processed(m, options) for m in media if m.kind == kind]
            if more := self.family.beside(kind, kinds):
                own = [_with(more, *one) for one in own]
            mark = self.family.mark(kind)
            spans = _found(tokens, self._encoded(kind), own)
            if spans is None:
                count = _count(tokens, self._encoded(kind))
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

    def _encoded(self, kind: str) -> np.ndarray:
        """The tokens of a mark."""
        mark, own = self.family.mark(kind), self.family.mark_tokens(kind)
        if own is not None:
            return np.array(own, dtype=np.int64)
        tokenizer = self._tokenizer
        if tokenizer is not None:
            return np.array(tokenizer.encode(mark, add_special_tokens=False), dtype=np.int64)
        inner = self.family.processor.tokenizer
        return np.array(inner.encode(mark, add_special_tokens=False), dtype=np.int64)

    def _processed(self, media: Media, options: Mapping[str, Any]) -> tuple[Processed, bytes]:
        """What the processor makes of an item, and the name of that."""
        key = self._key(media.hash, options)
        found = media.processed or self._cache.get(key)
        if found is None:
            if media.value is None:
                raise RequestError(
                    f"no {media.kind} of uuid {media.uuid!r:.80} is kept: send its data again",
                    "multi_modal_uuids",
                )
            with self._lock:
                found = self.family.process(media, options)
            self._cache.put(key, found)
        return found, found.hash or key

    def _key(self, name: bytes, options: Mapping[str, Any]) -> bytes:
        return fingerprint(name, dict(options), self._family_class.__name__)

    def embedded(self, item: MediaItem) -> Media:
        """An image that is embeddings already, of an item of the kind EMBEDS.

        Raises RequestError for families whose images are more than embeddings in the order of text.
        """
        family = self.family
        plain = type(family).positions is MediaFamily.positions
        if not plain or family.bidirectional or family.prefix or family.looks:
            raise RequestError("this model takes no embeddings of images", "image_embeds")
        mask = np.ones(item.length, dtype=bool)
        tokens = np.zeros(item.length, dtype=np.int64)
        made = Processed(item.kind, tokens, mask, item.tensors, hash=item.hash)
        return Media("image", None, hash=item.hash, processed=made)

    def kept(self, name: bytes, options: Mapping[str, Any] | None = None) -> Processed | None:
        """What the processor made of a content before; options: as `read` takes them."""
        return self._cache.get(self._key(name, self._keywords(options)))

    def _keywords(self, options: Mapping[str, Any] | None) -> Mapping[str, Any]:
        return {**self.flags.mm_processor_kwargs, **(options or {})}


@lru_cache(maxsize=4)
def load_processor(
    family: type[MediaFamily],
    path: str,
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """The processor of the checkpoint at `path`, made by its family; slow to make, so it is kept.

    tokenizer: the folder of its tokenizer, where that is another. Raises CheckpointError.
    """
    try:
        return family.open_processor(ProcessorFiles(path, tokenizer or path, trust_remote_code))
    except Exception as error:
        raise CheckpointError(f"{path}: its processor cannot be made: {error}") from error


def most_of(flags: MediaConfig, kind: str) -> int:
    """How many media of a kind one prompt may have."""
    if flags.language_model_only:
        return 0
    given = flags.limit_mm_per_prompt.get(kind, _MOST)
    return int(given["count"] if isinstance(given, Mapping) else given)


def _table(folder: str, name: str) -> dict[str, Any]:
    """A JSON file of the checkpoint; empty where there is none."""
    file = Path(folder) / name
    table = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return table if isinstance(table, dict) else {}


def _item(processed: Processed, start: int, digest: bytes) -> MediaItem:
    """The item that reaches from the first token with an embedding to the last.

    Where others stand between them, it says which are which.
    """
    inside = np.flatnonzero(processed.embedded)
    if not len(inside):
        raise RequestError(f"nothing is left of the {processed.kind}", "multi_modal_data")
    first, end = int(inside[0]), int(inside[-1]) + 1
    if processed.given:
        kind, tensors, seen = processed.kind, processed.tensors, start + first
        return MediaItem(kind, digest, 0, processed.given, tensors, cross=True, seen=seen)
    tensors = dict(processed.tensors)
    if len(inside) < end - first:
        tensors["item_tokens"] = processed.tokens[first:end]
        tensors["item_embedded"] = processed.embedded[first:end]
    spans = tuple((start + a, start + b) for a, b in processed.spans)
    return MediaItem(processed.kind, digest, start + first, end - first, tensors, spans)


def _with(
    more: Mapping[str, np.ndarray], processed: Processed, digest: bytes
) -> tuple[Processed, bytes]:
    """An item with tensors that others beside it bring, and its name then."""
    tensors = {**processed.tensors, **more}
    return evolve(processed, tensors=tensors), fingerprint(digest, *more.keys(), *more.values())


def _leading(tokens: np.ndarray, items: Sequence[MediaItem]) -> MediaItem:
    """The first item as one that begins with the prompt, all of whose tokens see each other: what
    is computed of any of them is known by all.
    """
    first = items[0]
    end = first.start + first.length
    inside = np.zeros(end, dtype=bool)
    inside[first.start :] = first.tensors.get("item_embedded", True)
    tensors = dict(first.tensors)
    if not inside.all():
        tensors |= {"item_tokens": tokens[:end], "item_embedded": inside}
    digest = fingerprint(tokens, *(item.hash for item in items))
    spans = ((0, len(tokens)),)
    return MediaItem(first.kind, digest, 0, end, tensors, spans)


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
