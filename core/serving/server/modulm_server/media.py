"""Media in requests: fetched, decoded and processed, off the event loop, to parts of prompts."""

from __future__ import annotations

import asyncio
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
from modulm_media.messages import MediaSource, part_kind
from modulm_media.requested import io_options, processor_options
from modulm_server.errors import ApiError
from modulm_server.prompt_embeds import read_embeds

if TYPE_CHECKING:
    from modulm_media.opener import MediaOpener
    from modulm_server.engine.client import EngineClient
    from modulm_server.prompts import ChatOptions

__all__ = ["MediaWork", "TakenMedia"]


def _has_media(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a part of the messages is no text."""
    return any(
        part_kind(part) is not None
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )


@frozen(eq=False)
class TakenMedia:
    """What was taken out of messages: where media are, and how the request wants them read."""

    sources: tuple[MediaSource, ...]
    io: Mapping[str, Mapping[str, Any]]
    processor: Mapping[str, Any]


class MediaWork:
    """One server's media. Processes, processors and threads are made when a request needs them."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._flags = engine.info.config.group(MediaConfig)

    @cached_property
    def reader(self) -> MediaReader | None:
        """What reads the model's prompts, None if it takes no media."""
        return MediaReader.open(self._engine.info, self._engine.tokenizer, manager.current())

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of media that requests may have."""
        return () if self.reader is None else self.reader.kinds

    async def take(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions
    ) -> tuple[Sequence[Any], TakenMedia | None]:
        """(messages, media) of messages: marks stand where media were; None where none were.

        Raises RequestError, also for more than a prompt may have; nothing is fetched yet.
        """
        io, given = options.media_io_kwargs, options.mm_processor_kwargs
        if io is None and given is None and not _has_media(messages):
            return messages, None
        plain, sources = messages, ()
        if _has_media(messages):
            plain, sources = await self._read(messages_media, messages, self.reader)
        taken = self._taken(sources, io, given)
        return plain, taken if sources else None

    def _taken(self, sources: Sequence[MediaSource], io: Any, given: Any) -> TakenMedia:
        """Sources with what a request says of how they are read. Raises RequestError."""
        ways = io_options(self._flags, io, "media_io_kwargs")
        processor = processor_options(self._flags, given, "mm_processor_kwargs")
        for source in sources:
            if source.embeds is not None and not self._flags.enable_mm_embeds:
                raise source.wrong("this server takes none; it would need --enable-mm-embeds")
        return TakenMedia(tuple(sources), ways, processor)

    async def contents(
        self, sides: Mapping[str, Any], io: Any, given: Any
    ) -> tuple[list[list[str | PairContent]], TakenMedia]:
        """The sides of pairs by their names in the request, and the media of all of them, which are
        not fetched yet; io, given: its `media_io_kwargs` and `mm_processor_kwargs`.

        Raises RequestError.
        """

        def made() -> list[list[str | PairContent]]:
            return [pair_contents(side, name, lambda: self.reader) for name, side in sides.items()]

        listed = [side if isinstance(side, list) else [side] for side in sides.values()]
        tables = [one for side in listed for one in side if isinstance(one, Mapping)]
        found = await self._read(made) if _has_media(tables) else made()
        contents = [one for side in found for one in side if isinstance(one, PairContent)]
        sources = [cast("MediaSource", source) for one in contents for source in one.media]
        return found, self._taken(sources, io, given)

    async def fill(self, ids: Sequence[int], taken: TakenMedia, owner: str) -> MediaPrompt:
        """The prompt of these ids with what the media become. Raises RequestError."""
        (found,) = await self.fill_each([(ids, taken.sources)], taken, owner)
        return found

    async def fill_each(
        self,
        prompts: Sequence[tuple[Sequence[int], Sequence[MediaSource]]],
        taken: TakenMedia,
        owner: str,
    ) -> list[MediaPrompt]:
        """Prompts of ids with what their media become; all that was taken is opened first, once
        and within the bounds of one request. Raises RequestError.
        """
        reader = self.reader
        if reader is None:
            raise taken.sources[0].wrong("the model takes no media")
        io = dict(taken.io)
        if any(source.kind == "audio" for source in taken.sources):
            io["audio"] = {"rate": reader.family.rate, **io["audio"]}
        kept = partial(reader.kept, options=taken.processor)
        files = [source for source in taken.sources if source.embeds is None]
        opened = iter(await self._opener.open(files, io, kept, owner))
        media: dict[int, Media] = {}
        for source in taken.sources:
            if source.embeds is None:
                media[id(source)] = next(opened)
            else:
                media[id(source)] = await self._read(self._embeds, source, reader)
        found: list[MediaPrompt] = []
        for ids, sources in prompts:
            own = [media[id(source)] for source in sources]
            try:
                found.append(await self._read(reader.read, ids, own, taken.processor))
            except RequestError as error:
                raise _blamed(sources, error) from error
        return found

    def _embeds(self, source: MediaSource, reader: MediaReader) -> Media:
        """An image that a client sends as embeddings."""
        try:
            return reader.embedded(read_embeds(source.embeds, self._engine.info, source.field))
        except (RequestError, ApiError) as error:
            raise source.wrong(error.message.removeprefix(f"{source.field}: ")) from error

    async def rate(self) -> int:
        """Samples a second of the sound that the model hears. Raises RequestError."""
        reader = self._heard_by()
        found: int = await self._read(lambda: reader.family.rate)
        return found

    async def decode(
        self, kind: MediaKind, data: bytes, io: Mapping[str, Any], limits: Limits
    ) -> Any:
        """The value of a file, decoded in a process of its own. Raises Undecodable."""
        return await self._opener.decode(kind, data, io, limits)

    async def place(self, ids: Sequence[int], media: Sequence[Media]) -> MediaPrompt:
        """The prompt of these ids with media that are decoded already. Raises RequestError."""
        found: MediaPrompt = await self._read(self._heard_by().read, ids, media)
        return found

    def _heard_by(self) -> MediaReader:
        if self.reader is None:
            raise RequestError("the model takes no media", "multi_modal_data")
        return self.reader

    @cached_property
    def _opener(self) -> MediaOpener:
        from modulm_media.opener import MediaOpener

        return MediaOpener(self._flags)

    async def _read(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call where the processor is used: one prompt after the other."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="modulm-media")

    def close(self) -> None:
        """End what was made."""
        if "_opener" in self.__dict__:
            self._opener.close()
        if "_thread" in self.__dict__:
            self._thread.shutdown(wait=False, cancel_futures=True)


def _blamed(sources: Sequence[MediaSource], error: RequestError) -> RequestError:
    """An error about a prompt's media as one about the request's."""
    if len(sources) == 1:
        return sources[0].wrong(error.message)
    field = sources[0].wrong("").param
    return RequestError(f"{field}: {error.message}", field)
