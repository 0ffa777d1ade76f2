"""Fetches, decodes and processes the media of requests, off the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

from attrs import frozen

from modulm.contracts.pooler import PairContent
from modulm.errors import RequestError
from modulm.plugins import manager
from modulm_frontend.prompt_media import messages_media, pair_contents
from modulm_media import Media, MediaPrompt, MediaReader
from modulm_media.flags import MediaConfig, MediaKind
from modulm_media.limits import Limits
from modulm_media.messages import MediaSource, part_kind, source_of
from modulm_media.requested import io_options, processor_options
from modulm_server.errors import ApiError
from modulm_server.prompt_embeds import read_embeds

if TYPE_CHECKING:
    from modulm_media.opener import MediaOpener
    from modulm_server.engine.client import EngineClient
    from modulm_server.prompts import ChatOptions

__all__ = ["MediaService", "RequestMedia"]


def _has_media(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any part of the messages is media."""
    return any(
        part_kind(part) is not None
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )


@frozen(eq=False)
class RequestMedia:
    """The media of a request: their sources, and its options for decoding and processing them."""

    sources: tuple[MediaSource, ...]
    io: Mapping[str, Mapping[str, Any]]
    processor: Mapping[str, Any]


class MediaService:
    """The media work of one server. Creates processes and threads on first use."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._flags = engine.info.config.group(MediaConfig)

    @cached_property
    def reader(self) -> MediaReader | None:
        """The reader of prompts with media; None if the model takes none."""
        return MediaReader.open(self._engine.info, self._engine.tokenizer, manager.current())

    @property
    def cache_counts(self) -> tuple[int, int]:
        """The items that were looked up in the cache of processed media, and found there."""
        reader = self.__dict__.get("reader")
        return (0, 0) if reader is None else (reader.queries, reader.hits)

    def clear_cache(self) -> None:
        """Empty the cache of processed media."""
        reader = self.__dict__.get("reader")
        if reader is not None:
            reader.clear()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of media that the model takes."""
        return () if self.reader is None else self.reader.kinds

    async def extract(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions
    ) -> tuple[Sequence[Any], RequestMedia | None]:
        """Replace the media of messages by placeholders; returns (messages, media or None).

        Fetches nothing yet. Raises RequestError, also for more media than a prompt may have.
        """
        io, processor_kwargs = options.media_io_kwargs, options.mm_processor_kwargs
        if io is None and processor_kwargs is None and not _has_media(messages):
            return messages, None
        plain, sources = messages, ()
        if _has_media(messages):
            plain, sources = await self._read(messages_media, messages, self.reader)
        media = self._request_media(sources, io, processor_kwargs)
        return plain, media if sources else None

    def _request_media(
        self, sources: Sequence[MediaSource], io: Any, processor_kwargs: Any
    ) -> RequestMedia:
        """Combine sources with a request's options for reading them. Raises RequestError."""
        io_by_kind = io_options(self._flags, io, "media_io_kwargs")
        processor = processor_options(self._flags, processor_kwargs, "mm_processor_kwargs")
        for source in sources:
            if source.embeds is not None and not self._flags.enable_mm_embeds:
                raise source.wrong("not enabled on this server: start it with --enable-mm-embeds")
        return RequestMedia(tuple(sources), io_by_kind, processor)

    async def read_parts(self, parts: Sequence[Mapping[str, Any]], name: str) -> RequestMedia:
        """Read the media of a prompt of token ids, in the order of their placeholders.

        parts: content parts as in messages, all of them media. name: the request's field. Fetches
        nothing yet. Raises RequestError, also for more media than a prompt may have.
        """
        sources: list[MediaSource] = []
        for at, part in enumerate(parts):
            kind = part_kind(part)
            if kind is None:
                message = f"{name}[{at}]: must be media, such as an image_url"
                raise RequestError(message, name)
            sources.append(source_of(kind, part, f"{name}[{at}]"))
        reader = await self._read(lambda: self.reader)
        if reader is None:
            raise sources[0].wrong(f"the model does not support {sources[0].kind} input")
        try:
            reader.check(Counter(str(source.kind) for source in sources))
        except RequestError as error:
            raise RequestError(f"{name}: {error.message}", name) from error
        return self._request_media(sources, None, None)

    async def read_pairs(
        self, sides: Mapping[str, Any], io: Any, processor_kwargs: Any
    ) -> tuple[list[list[str | PairContent]], RequestMedia]:
        """Read the sides of pairs to score; returns (sides, the media of all of them).

        sides: by their field in the request. io, processor_kwargs: its `media_io_kwargs` and
        `mm_processor_kwargs`. Fetches nothing yet. Raises RequestError.
        """

        def read_sides() -> list[list[str | PairContent]]:
            return [pair_contents(side, name, lambda: self.reader) for name, side in sides.items()]

        listed = [side if isinstance(side, list) else [side] for side in sides.values()]
        tables = [item for side in listed for item in side if isinstance(item, Mapping)]
        sides_read = await self._read(read_sides) if _has_media(tables) else read_sides()
        contents = [item for side in sides_read for item in side if isinstance(item, PairContent)]
        sources = [cast("MediaSource", source) for item in contents for source in item.media]
        return sides_read, self._request_media(sources, io, processor_kwargs)

    async def fill(self, ids: Sequence[int], media: RequestMedia, owner: str) -> MediaPrompt:
        """Fetch the media of a prompt and put them into its token ids. Raises RequestError."""
        (prompt,) = await self.fill_each([(ids, media.sources)], media, owner)
        return prompt

    async def fill_each(
        self,
        prompts: Sequence[tuple[Sequence[int], Sequence[MediaSource]]],
        request_media: RequestMedia,
        owner: str,
    ) -> list[MediaPrompt]:
        """Fetch the media of several prompts and put them into their token ids.

        Opens all media first, each once and within the limits of one request, and drops the pixels
        and samples of each when it is processed. Raises RequestError, or QueueFull if the media in
        progress exceed the memory limit.
        """
        reader = self.reader
        if reader is None:
            raise request_media.sources[0].wrong("the model does not support media")
        io = dict(request_media.io)
        if any(source.kind == "audio" for source in request_media.sources):
            io["audio"] = {"rate": reader.family.rate, **io["audio"]}
        cached = partial(reader.cached, options=request_media.processor)
        files = [source for source in request_media.sources if source.embeds is None]

        async def prepare(item: Media) -> Media:
            prepared: Media = await self._read(reader.prepare, item, request_media.processor)
            return prepared

        with self._opener.memory.reserve(owner) as held:
            opened = iter(await self._opener.open(files, io, cached, owner, held, prepare))
            media: dict[int, Media] = {}
            for source in request_media.sources:
                if source.embeds is None:
                    media[id(source)] = next(opened)
                else:
                    media[id(source)] = await self._read(self._embeds, source, reader)
            filled: list[MediaPrompt] = []
            for ids, sources in prompts:
                prompt_media = [media[id(source)] for source in sources]
                try:
                    filled.append(
                        await self._read(reader.read, ids, prompt_media, request_media.processor)
                    )
                except RequestError as error:
                    raise _request_error(sources, error) from error
            return filled

    def _embeds(self, source: MediaSource, reader: MediaReader) -> Media:
        """Read an image that a client sent as embeddings."""
        try:
            return reader.embedded(read_embeds(source.embeds, self._engine.info, source.field))
        except (RequestError, ApiError) as error:
            raise source.wrong(error.message.removeprefix(f"{source.field}: ")) from error

    async def audio_rate(self) -> int:
        """The model's audio sampling rate in Hz. Raises RequestError."""
        reader = self._required_reader()
        rate: int = await self._read(lambda: reader.family.rate)
        return rate

    async def decode(
        self, kind: MediaKind, data: bytes, io: Mapping[str, Any], limits: Limits
    ) -> Any:
        """Decode a file in a separate process. Raises Undecodable."""
        return await self._opener.decode(kind, data, io, limits)

    async def fill_decoded(self, ids: Sequence[int], media: Sequence[Media]) -> MediaPrompt:
        """Put decoded media into the token ids of a prompt. Raises RequestError."""
        prompt: MediaPrompt = await self._read(self._required_reader().read, ids, media)
        return prompt

    def _required_reader(self) -> MediaReader:
        if self.reader is None:
            raise RequestError("the model does not support media", "multi_modal_data")
        return self.reader

    @cached_property
    def _opener(self) -> MediaOpener:
        from modulm_media.opener import MediaOpener

        return MediaOpener(self._flags)

    async def _read(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on the media thread, which reads one prompt after the other."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="modulm-media")

    def close(self) -> None:
        """Stop the processes and the thread that were started."""
        if "_opener" in self.__dict__:
            self._opener.close()
        if "_thread" in self.__dict__:
            self._thread.shutdown(wait=False, cancel_futures=True)


def _request_error(sources: Sequence[MediaSource], error: RequestError) -> RequestError:
    """Turn an error about a prompt's media into one about the request's field."""
    if len(sources) == 1:
        return sources[0].wrong(error.message)
    field = sources[0].wrong("").param
    return RequestError(f"{field}: {error.message}", field)
