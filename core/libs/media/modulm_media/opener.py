"""Open a request's media: fetch and decode them, and name them by content."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modulm.errors import RequestError
from modulm_media.fetch import Budget, Fetcher, from_base64
from modulm_media.flags import MediaConfig, MediaKind
from modulm_media.limits import Limits, Undecodable
from modulm_media.memory import MediaMemory, Reservation, default_limit
from modulm_media.messages import MediaSource
from modulm_media.offline import OWN, as_media
from modulm_media.values import Media, Sound, Video, fingerprint
from modulm_media.workers import DecodeWorkers, process_count

if TYPE_CHECKING:
    from modulm_media.family import Processed

__all__ = ["MediaOpener", "limits_of"]

#: Files of one request that are fetched at once, and the limit of what is held of all together, in
#: bytes: less than a frame to the engine takes.
_AT_ONCE, _TOGETHER = 8, 1_000_000_000
#: Number of uuids that are remembered.
_NAMES = 4096

#: Looks up the processor's output for a content hash; None if it is not cached.
CacheLookup = Callable[[bytes], "Processed | None"]
#: Prepares a decoded item for the model, so that its pixels or samples need not be kept.
Prepare = Callable[[Media], Awaitable[Media]]


class MediaOpener:
    """Opens the media of requests; safe to use from several event loops.

    trusted: requests come from the process itself, so they may name any file and pass values.
    """

    def __init__(self, flags: MediaConfig, trusted: bool = False) -> None:
        self._trusted = trusted
        self._fetcher, self._flags = Fetcher(flags, any_file=trusted), flags
        count = process_count(flags)
        self.workers = DecodeWorkers(count, flags.media_decode_timeout)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="modulm-media-decode")
        self._limits = limits_of(flags, trusted)
        self.memory = MediaMemory(flags.max_inflight_media_bytes or default_limit())
        self._names: OrderedDict[tuple[str, str, str], bytes] = OrderedDict()

    async def open(
        self,
        sources: Sequence[MediaSource],
        io: Mapping[str, Mapping[str, Any]],
        cached: CacheLookup = lambda name: None,
        owner: str = "",
        reservation: Reservation | None = None,
        prepare: Prepare | None = None,
    ) -> tuple[Media, ...]:
        """Open all sources, in order. Cached media are not decoded again.

        io: decoding options by kind. cached: looks up processor outputs. owner: namespace of the
        uuids. reservation: holds the bytes of all media. prepare: called with each item before
        further files are decoded; gives back what it drops. Raises RequestError that names the
        first invalid field, or QueueFull.
        """
        budget, slots = Budget(self._flags, reservation), asyncio.Semaphore(_AT_ONCE)
        room_left = [_TOGETHER]

        async def one(source: MediaSource) -> Media:
            decoded: list[int] = []

            def reserve(size: int) -> None:
                if reservation is not None:
                    reservation.take(size)
                    decoded.append(size)

            async with slots:
                media = await self._one(source, io, cached, owner, budget, reserve)
                if prepare is not None and media.value is not None:
                    media = await _prepared(source, media, prepare)
                if reservation is not None and media.value is None:
                    reservation.give(sum(decoded))
                room_left[0] -= _size(media)
                if room_left[0] < 0:
                    raise source.wrong(
                        f"the media of the request take more than {_TOGETHER // 10**6} MB as the "
                        "model reads them: send fewer or smaller ones"
                    )
            return media

        tasks = [asyncio.ensure_future(one(source)) for source in sources]
        try:
            return tuple(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def decode(
        self, kind: MediaKind, data: bytes, io: Mapping[str, Any], limits: Limits
    ) -> Any:
        """Decode a file that is already in memory. Raises Undecodable."""
        decoded = partial(self.workers.decode, kind, data, io, limits)
        return await asyncio.get_running_loop().run_in_executor(self._threads, decoded)

    def open_now(
        self, sources: Sequence[MediaSource], io: Mapping[str, Mapping[str, Any]]
    ) -> tuple[Media, ...]:
        """Synchronous `open`, for callers outside an event loop or with one of their own."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(self.open(sources, io))).result()

    async def _one(
        self,
        source: MediaSource,
        io: Mapping[str, Mapping[str, Any]],
        cached: CacheLookup,
        owner: str,
        budget: Budget,
        reserve: Callable[[int], None] | None,
    ) -> Media:
        if source.value is not None:
            if not self._trusted:
                raise source.wrong("must have a url")
            return await asyncio.to_thread(as_media, source.kind, source.value, source.uuid)
        if source.embeds is not None:
            raise source.wrong("embeddings are accepted by servers only")
        if source.url is None and source.data is None:
            return self._remembered(source, cached, owner)
        try:
            data = await self._data(source, budget)
            return await asyncio.get_running_loop().run_in_executor(
                self._threads,
                partial(
                    self._decoded, source, data, io.get(source.kind, {}), cached, owner, reserve
                ),
            )
        except Undecodable as error:
            raise source.wrong(str(error)) from error

    async def _data(self, source: MediaSource, budget: Budget) -> bytes:
        if source.data is not None:
            return await from_base64(source.data, budget)
        url = source.url or ""
        if self._trusted and ":" not in url[:8]:
            url = Path(url).absolute().as_uri()
        return await self._fetcher.get(url, source.kind, budget)

    def _decoded(
        self,
        source: MediaSource,
        data: bytes,
        io: Mapping[str, Any],
        cached: CacheLookup,
        owner: str,
        reserve: Callable[[int], None] | None = None,
    ) -> Media:
        """Decode a file, unless its content is cached; the content hash is its name."""
        name = fingerprint(source.kind, "file", dict(io), data)
        if source.uuid is not None:
            self._remember((owner, source.kind, source.uuid), name)
        processed = cached(name)
        if processed is not None:
            return Media(source.kind, None, hash=name, processed=processed)
        value = self.workers.decode(source.kind, data, io, self._limits, reserve)
        return Media(source.kind, value, hash=name)

    def _remembered(self, source: MediaSource, cached: CacheLookup, owner: str) -> Media:
        """Look up media that were sent before under a uuid."""
        if self._trusted:
            return as_media(source.kind, None, source.uuid)
        name = self._names.get((owner, source.kind, source.uuid or ""))
        processed = None if name is None else cached(name)
        if name is None or processed is None:
            raise source.wrong(
                f"no {source.kind} with uuid {source.uuid!r:.80} is cached: send its data again"
            )
        return Media(source.kind, None, hash=name, processed=processed)

    def _remember(self, key: tuple[str, str, str], name: bytes) -> None:
        self._names[key] = name
        self._names.move_to_end(key)
        while len(self._names) > _NAMES:
            self._names.popitem(last=False)

    def close(self) -> None:
        """End the decoding processes."""
        self._fetcher.close()
        self.workers.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def limits_of(flags: MediaConfig, trusted: bool) -> Limits:
    """Decoding limits for requests, or for the process's own callers."""
    if trusted:
        return OWN
    return Limits(
        pixels=flags.max_image_pixels,
        seconds=flags.max_audio_decode_duration_s,
        frames=flags.max_video_frames,
    )


async def _prepared(source: MediaSource, media: Media, prepare: Prepare) -> Media:
    """Prepare an item. Raises RequestError that names its field."""
    try:
        return await prepare(media)
    except RequestError as error:
        raise source.wrong(error.message) from error


def _size(media: Media) -> int:
    """Bytes of an item's value and of the processor's output for it."""
    value, processed = media.value, media.processed
    size = 0 if processed is None else processed.nbytes
    if isinstance(value, Sound):
        return size + value.samples.nbytes
    if isinstance(value, Video):
        return size + value.frames.nbytes
    return size if value is None else size + 3 * value.width * value.height
