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
from modulm.loading.sources import tokenizer_path
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

#: Default limit of items per kind in a prompt.
_MOST = 999


@frozen(eq=False)
class MediaPrompt:
    """A prompt with its placeholders filled in.

    tokens: [n] int64. items: in order of their placeholders. positions, offset: as in
    `modulm.contracts.requests.Request`.
    """

    tokens: np.ndarray
    items: tuple[MediaItem, ...]
    positions: np.ndarray | None = None
    offset: int = 0


class MediaReader:
    """Reads the prompts of one engine. The processor is created for the first prompt with media.

    opens: the family that creates the processor, if it differs from `family`.
    """

    def __init__(
        self,
        family: type[MediaFamily],
        info: EngineInfo,
        tokenizer: Tokenizer | None,
        opens: type[MediaFamily] | None = None,
    ) -> None:
        self._opens: Any = opens or family  # mypy considers classes unhashable
        self._family_class, self._info, self._tokenizer = family, info, tokenizer
        self.flags = info.config.group(MediaConfig)
        self._cache = ProcessedCache(int(self.flags.mm_processor_cache_gb * 2**30))
        #: Items that were looked up in the cache, and found there.
        self.queries = self.hits = 0
        # Tokenizers of processors are not thread-safe.
        self._lock = Lock()

    @classmethod
    def open(
        cls, info: EngineInfo, tokenizer: Tokenizer | None, plugins: PluginManager
    ) -> Self | None:
        """Create the reader for an engine's prompts; None if its model takes no media."""

        def load_family(name: str) -> type[MediaFamily] | None:
            try:
                family: type[MediaFamily] = plugins.load("media_families", name)
            except PluginNotFound:
                return None
            return family

        architecture_family, name = load_family(info.architecture), info.description.media_family
        family = load_family(name) if name else architecture_family
        return None if family is None else cls(family, info, tokenizer, architecture_family)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of media that prompts may have."""
        kinds = self._family_class.kinds
        return tuple(kind for kind in kinds if most_of(self.flags, kind))

    @cached_property
    def family(self) -> MediaFamily:
        """The architecture's media family, with the checkpoint's processor.

        Raises CheckpointError if the processor cannot be created.
        """
        model, path = self._info.config.model, self._info.path
        config = {**_table(path, "generation_config.json"), **_table(path, "config.json")}
        if self._family_class.reads_text:
            return self._family_class(None, config)
        tokenizer = tokenizer_path(self._info.config, path)
        processor = load_processor(self._opens, path, tokenizer, model.trust_remote_code)
        family = self._family_class(processor, config)
        family.video_pruning_rate = self.flags.video_pruning_rate or 0.0
        return family

    @property
    def crosses(self) -> bool:
        """Whether the prompt is the decoder's beginning, and media reach it by cross attention."""
        return self._family_class.crosses

    @property
    def reads_text(self) -> bool:
        """Whether the encoder reads the prompt's text and the decoder writes the answer."""
        return self._family_class.reads_text

    def mark(self, kind: str) -> str:
        """The placeholder of an item of this kind in the text of a prompt."""
        self.check({kind: 1})
        return self.family.mark(kind)

    def check(self, counts: Mapping[str, int]) -> None:
        """Raise RequestError for kinds that the model does not take, and for too many items."""
        for kind, count in counts.items():
            if kind not in self._family_class.kinds:
                supported = ", ".join(self._family_class.kinds)
                raise RequestError(
                    f"the model does not support {kind} input, only {supported}", kind
                )
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
        """Fill in a prompt's placeholders, with media of one kind in order.

        options: keyword arguments for the processor, in addition to --mm-processor-kwargs. Raises
        RequestError that names the invalid field.
        """
        counts = {kind: sum(m.kind == kind for m in media) for kind in KINDS}
        self.check({kind: count for kind, count in counts.items() if count})
        keywords = self._keywords(options)
        if self._family_class.crosses:
            return self._encode_single(tokens, media, keywords)
        prompt = np.asarray(tokens, dtype=np.int64)
        for kind in {m.kind for m in media}:
            prompt = self.family.complete_prompt(prompt, self._encoded(kind))
        if media:
            prompt, media = self.family.group_media(prompt, media, keywords)
        pieces: list[np.ndarray] = []
        items: list[MediaItem] = []
        processed_items: list[tuple[int, Processed]] = []
        length = last = 0
        for at, end, one in self._placeholders(prompt, media, keywords):
            processed, digest = one
            before, rest = prompt[last:at], end
            if not np.array_equal(prompt[at:end], processed.tokens):
                before, processed, rest = self._joined(before, processed, prompt, end)
            length += len(before)
            pieces += [before, processed.tokens]
            processed_items.append((length, processed))
            items.append(_item(processed, length, digest))
            length += len(processed.tokens)
            last = rest
        filled = np.concatenate([*pieces, prompt[last:]])
        if self.family.prefix and items:
            items[0] = _leading(filled, items)
        if self.family.together and len(items) > 1:
            items = _linked(filled, items)
        positions = self.family.positions(filled, processed_items)
        offset = 0 if positions is None else int(positions.max()) + 1 - len(filled)
        return MediaPrompt(filled, tuple(items), positions, offset)

    def read_text(
        self, tokens: Sequence[int] | np.ndarray, decoder_start: Sequence[int] | None = None
    ) -> MediaPrompt:
        """Build the prompt of an encoder-decoder model whose encoder reads these tokens.

        decoder_start: first tokens of the decoder; None means the model's default. Raises
        RequestError.
        """
        prompt = np.asarray(tokens, dtype=np.int64)
        if not len(prompt) or prompt.min() < 0 or prompt.max() >= self._info.vocabulary:
            message = f"prompt: ids from 0 to {self._info.vocabulary - 1} are expected"
            raise RequestError(message, "prompt")
        return self._answering(decoder_start, self.family.text(prompt), fingerprint("text", prompt))

    def _encode_single(
        self, tokens: Sequence[int] | np.ndarray, media: Sequence[Media], options: Mapping[str, Any]
    ) -> MediaPrompt:
        """Build a prompt with its one encoded item."""
        if len(media) != 1:
            kinds = " or ".join(self._family_class.kinds)
            message = f"{len(media)} items: the model takes one {kinds} in a prompt"
            raise RequestError(message, "multi_modal_data")
        return self._answering(tokens, *self._processed(media[0], options))

    def _answering(
        self, decoder_start: Sequence[int] | np.ndarray | None, processed: Processed, digest: bytes
    ) -> MediaPrompt:
        first = (
            self.family.start()
            if decoder_start is None or not len(decoder_start)
            else decoder_start
        )
        kind, tensors = processed.kind, processed.tensors
        item = MediaItem(kind, digest, 0, processed.encoder_outputs, tensors, cross=True)
        return MediaPrompt(np.asarray(first, dtype=np.int64), (item,))

    def _placeholders(
        self, tokens: np.ndarray, media: Sequence[Media], options: Mapping[str, Any]
    ) -> list[tuple[int, int, tuple[Processed, bytes]]]:
        """(first, end, item) of every placeholder, in order."""
        placeholders: list[tuple[int, int, tuple[Processed, bytes]]] = []
        kinds = tuple(dict.fromkeys(m.kind for m in media))
        for kind in kinds:
            processed_items = [self._processed(m, options) for m in media if m.kind == kind]
            if more := self.family.extra_tensors(kind, kinds):
                processed_items = [_with(more, *one) for one in processed_items]
            mark = self.family.mark(kind)
            spans = _placeholder_spans(tokens, self._encoded(kind), processed_items)
            if spans is None:
                count = _count(tokens, self._encoded(kind))
                raise RequestError(
                    f"the prompt has {count} placeholders {mark!r} for "
                    f"{len(processed_items)} {kind} items: write one where each item belongs",
                    "prompt",
                )
            placeholders += [
                (a, b, one) for (a, b), one in zip(spans, processed_items, strict=True)
            ]
        return sorted(placeholders, key=lambda placeholder: placeholder[0])

    def _joined(
        self, before: np.ndarray, item: Processed, prompt: np.ndarray, end: int
    ) -> tuple[np.ndarray, Processed, int]:
        """Merge tokens where text and an item meet.

        Returns (tokens before the item, the item, where text continues). prompt[end:] is the text
        after it.
        """
        tokens = item.tokens
        if len(before) and not item.embedded[0]:
            one = self.family.merged_token(int(before[-1]), int(tokens[0]))
            if one is not None:
                before, tokens = before[:-1], np.concatenate([[one], tokens[1:]])
        if end < len(prompt) and not item.embedded[-1]:
            one = self.family.merged_token(int(tokens[-1]), int(prompt[end]))
            if one is not None:
                end, tokens = end + 1, np.concatenate([tokens[:-1], [one]])
        return before, evolve(item, tokens=tokens), end

    def _encoded(self, kind: str) -> np.ndarray:
        """Return the tokens of a placeholder."""
        mark, mark_ids = self.family.mark(kind), self.family.mark_tokens(kind)
        if mark_ids is not None:
            return np.array(mark_ids, dtype=np.int64)
        tokenizer = self._tokenizer
        if tokenizer is not None:
            return np.array(tokenizer.encode(mark, add_special_tokens=False), dtype=np.int64)
        inner = self.family.processor.tokenizer
        return np.array(inner.encode(mark, add_special_tokens=False), dtype=np.int64)

    def _processed(self, media: Media, options: Mapping[str, Any]) -> tuple[Processed, bytes]:
        """Run the processor on an item, unless cached; returns its output and name."""
        key = self._key(media.hash, options)
        processed = media.processed or self._cache.get(key)
        if processed is None:
            if media.value is None:
                raise RequestError(
                    f"no {media.kind} with uuid {media.uuid!r:.80} is cached: send its data again",
                    "multi_modal_uuids",
                )
            with self._lock:
                processed = self.family.process(media, options)
            self._cache.put(key, processed)
        return processed, processed.hash or key

    def _key(self, name: bytes, options: Mapping[str, Any]) -> bytes:
        rate = self.flags.video_pruning_rate
        return fingerprint(name, dict(options), self._family_class.__name__, *[rate] * bool(rate))

    def embedded(self, item: MediaItem) -> Media:
        """Make media from an item of precomputed embeddings (kind EMBEDS).

        Raises RequestError for families whose images need more than embeddings in text order.
        """
        family = self.family
        plain = type(family).positions is MediaFamily.positions
        if not plain or family.bidirectional or family.prefix or family.looks:
            raise RequestError("this model does not support image embeddings", "image_embeds")
        mask = np.ones(item.length, dtype=bool)
        tokens = np.zeros(item.length, dtype=np.int64)
        processed = Processed(item.kind, tokens, mask, item.tensors, hash=item.hash)
        return Media("image", None, hash=item.hash, processed=processed)

    def cached(self, name: bytes, options: Mapping[str, Any] | None = None) -> Processed | None:
        """Return the cached processor output of a content; options: as for `read`."""
        processed = self._cache.get(self._key(name, self._keywords(options)))
        self.queries += 1
        self.hits += processed is not None
        return processed

    def prepare(self, media: Media, options: Mapping[str, Any] | None = None) -> Media:
        """Run the processor on one item of a prompt, and drop its pixels or samples.

        options: as for `read`. Items stay as they are in families whose `needs_values` says so.
        Raises RequestError.
        """
        keywords = self._keywords(options)
        if media.processed is not None or self.family.needs_values(keywords):
            return media
        processed, _ = self._processed(media, keywords)
        return Media(media.kind, None, media.uuid, media.hash, processed)

    def clear(self) -> None:
        """Empty the cache of processor outputs."""
        self._cache.clear()

    def _keywords(self, options: Mapping[str, Any] | None) -> Mapping[str, Any]:
        return {**self.flags.mm_processor_kwargs, **(options or {})}


@lru_cache(maxsize=4)
def load_processor(
    family: type[MediaFamily],
    path: str,
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Create the processor of the checkpoint at `path` by its family; cached, because it is slow.

    tokenizer: the folder of its tokenizer, if it differs. Raises CheckpointError.
    """
    try:
        return family.open_processor(ProcessorFiles(path, tokenizer or path, trust_remote_code))
    except Exception as error:
        raise CheckpointError(f"{path}: its processor cannot be created: {error}") from error


def most_of(flags: MediaConfig, kind: str) -> int:
    """Return the limit of items of a kind per prompt."""
    if flags.language_model_only:
        return 0
    limit = flags.limit_mm_per_prompt.get(kind, _MOST)
    return int(limit["count"] if isinstance(limit, Mapping) else limit)


def _table(folder: str, name: str) -> dict[str, Any]:
    """Read a JSON file of the checkpoint; empty if it does not exist."""
    file = Path(folder) / name
    table = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return table if isinstance(table, dict) else {}


def _item(processed: Processed, start: int, digest: bytes) -> MediaItem:
    """Build the item from the first embedded token to the last.

    If other tokens lie between them, the item's tensors say which are embedded.
    """
    inside = np.flatnonzero(processed.embedded)
    if not len(inside):
        raise RequestError(f"no tokens remain of the {processed.kind}", "multi_modal_data")
    first, end = int(inside[0]), int(inside[-1]) + 1
    if processed.encoder_outputs:
        kind, tensors, seen = processed.kind, processed.tensors, start + first
        return MediaItem(kind, digest, 0, processed.encoder_outputs, tensors, cross=True, seen=seen)
    tensors = dict(processed.tensors)
    if len(inside) < end - first:
        tensors["item_tokens"] = processed.tokens[first:end]
        tensors["item_embedded"] = processed.embedded[first:end]
    spans = tuple((start + a, start + b) for a, b in processed.spans)
    return MediaItem(processed.kind, digest, start + first, end - first, tensors, spans)


def _with(
    more: Mapping[str, np.ndarray], processed: Processed, digest: bytes
) -> tuple[Processed, bytes]:
    """Add tensors that depend on other kinds in the prompt; returns the item and its new name."""
    tensors = {**processed.tensors, **more}
    return evolve(processed, tensors=tensors), fingerprint(digest, *more.keys(), *more.values())


def _linked(tokens: np.ndarray, items: Sequence[MediaItem]) -> list[MediaItem]:
    """Items whose tokens attend to each other: their results depend on all of them, and on the text
    between them. The last item has the span from the first to the last, which no step cuts, and the
    spans of all as tensor "item_together" ([n, 2] int64).
    """
    spans = np.array([span for item in items for span in item.spans], dtype=np.int64)
    first, end = int(spans.min()), int(spans.max())
    between = fingerprint(tokens[first:end], *(item.hash for item in items))
    linked = [
        evolve(item, hash=fingerprint(between, str(number)), spans=())
        for number, item in enumerate(items)
    ]
    tensors = {**items[-1].tensors, "item_together": spans}
    linked[-1] = evolve(linked[-1], spans=((first, end),), tensors=tensors)
    return linked


def _leading(tokens: np.ndarray, items: Sequence[MediaItem]) -> MediaItem:
    """Extend the first item to the beginning of the prompt.

    All tokens of such prompts attend to each other, so any result depends on all of them.
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


def _placeholder_spans(
    tokens: np.ndarray, mark: np.ndarray, items: Sequence[tuple[Processed, bytes]]
) -> list[tuple[int, int]] | None:
    """(first, end) of each item's placeholder, or of its tokens if already filled in.

    None if the numbers differ.
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
    """Number of tokens before the first mark, 0 if there is none."""
    starts = _starts(tokens, mark)
    return int(starts[0]) if len(starts) else 0


def _starts(tokens: np.ndarray, mark: np.ndarray) -> np.ndarray:
    """Indices at which the mark begins in the tokens."""
    if not len(mark) or len(tokens) < len(mark):
        return np.zeros(0, dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(mark))
    return np.flatnonzero((windows == mark).all(axis=1))


def _count(tokens: np.ndarray, mark: np.ndarray) -> int:
    return len(_starts(tokens, mark))
