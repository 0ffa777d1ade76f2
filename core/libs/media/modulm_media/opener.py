"""From where a request says its media are to their values: fetched, decoded, named by content."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modulm_media.fetch import Budget, Fetcher, from_base64
from modulm_media.flags import MediaConfig, MediaKind
from modulm_media.limits import Limits, Undecodable
from modulm_media.messages import MediaSource
from modulm_media.offline import OWN, as_media
from modulm_media.values import Media, Sound, Video, fingerprint
from modulm_media.workers import DecodeWorkers, process_count

if TYPE_CHECKING:
    from PIL.Image import Image

    from modulm_media.family import Processed

__all__ = ["MediaOpener", "limits_of"]

#: Files of one request that are fetched at a time, and bytes of what all of them decode to.
_AT_ONCE, _TOGETHER = 8, 1 << 30
#: Names of media that are known.
_NAMES = 4096

#: What is kept of a content that was processed before, by its name.
Kept = Callable[[bytes], "Processed | None"]


class MediaOpener:
    """Opens the media of requests; safe on several event loops.

    own: requests are a program's own, which may name any file and give values.
    """

    def __init__(self, flags: MediaConfig, own: bool = False) -> None:
        self._own = own
        self._fetcher, self._flags = Fetcher(flags, any_file=own), flags
        count = process_count(flags)
        self.workers = DecodeWorkers(count, flags.media_decode_timeout)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="modulm-media-decode")
        self._limits = limits_of(flags, own)
        self._names: OrderedDict[tuple[str, str, str], bytes] = OrderedDict()

    async def open(
        self,
        sources: Sequence[MediaSource],
        io: Mapping[str, Mapping[str, Any]],
        kept: Kept = lambda name: None,
        owner: str = "",
    ) -> tuple[Media, ...]:
        """The values, in order. io: how files are decoded, by kind. owner: whose names they are.

        What is kept is not decoded again. Raises RequestError naming the first field to blame.
        """
        budget, rooms = Budget(self._flags), asyncio.Semaphore(_AT_ONCE)
        left = [_TOGETHER]

        async def one(source: MediaSource) -> Media:
            async with rooms:
                found = await self._one(source, io, kept, owner, budget)
            left[0] -= _size(found.value)
            if left[0] < 0:
                raise source.wrong("the request's media are too large together")
            return found

        tasks = [asyncio.ensure_future(one(source)) for source in sources]
        try:
            return tuple(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def decode(
        self, kind: MediaKind, data: bytes, io: Mapping[str, Any], limits: Limits
    ) -> Any:
        """The value of a file that is here already. Raises Undecodable."""
        decoded = partial(self.workers.decode, kind, data, io, limits)
        return await asyncio.get_running_loop().run_in_executor(self._threads, decoded)

    def open_now(
        self, sources: Sequence[MediaSource], io: Mapping[str, Mapping[str, Any]]
    ) -> tuple[Media, ...]:
        """The same for a caller without an event loop, or that has one of its own."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(self.open(sources, io))).result()

    async def _one(
        self,
        source: MediaSource,
        io: Mapping[str, Mapping[str, Any]],
        kept: Kept,
        owner: str,
        budget: Budget,
    ) -> Media:
        if source.value is not None:
            if not self._own:
                raise source.wrong("a url is expected")
            return await asyncio.to_thread(as_media, source.kind, source.value, source.uuid)
        if source.embeds is not None:
            raise source.wrong("only servers take embeddings here")
        if source.url is None and source.data is None:
            return self._named(source, kept, owner)
        try:
            data = await self._data(source, budget)
            return await asyncio.get_running_loop().run_in_executor(
                self._threads,
                partial(self._decoded, source, data, io.get(source.kind, {}), kept, owner),
            )
        except Undecodable as error:
            raise source.wrong(str(error)) from error

    async def _data(self, source: MediaSource, budget: Budget) -> bytes:
        if source.data is not None:
            return await from_base64(source.data, budget)
        url = source.url or ""
        if self._own and ":" not in url[:8]:
            url = Path(url).absolute().as_uri()
        return await self._fetcher.get(url, source.kind, budget)

    def _decoded(
        self, source: MediaSource, data: bytes, io: Mapping[str, Any], kept: Kept, owner: str
    ) -> Media:
        """The value of a file, or what is kept of one; its content is its name."""
        name = fingerprint(source.kind, "file", dict(io), data)
        if source.uuid is not None:
            self._remember((owner, source.kind, source.uuid), name)
        processed = kept(name)
        if processed is not None:
            return Media(source.kind, None, hash=name, processed=processed)
        value = self.workers.decode(source.kind, data, io, self._limits)
        return Media(source.kind, value, hash=name)

    def _named(self, source: MediaSource, kept: Kept, owner: str) -> Media:
        """What was sent before under a name."""
        if self._own:
            return as_media(source.kind, None, source.uuid)
        name = self._names.get((owner, source.kind, source.uuid or ""))
        processed = None if name is None else kept(name)
        if name is None or processed is None:
            raise source.wrong(
                f"no {source.kind} of uuid {source.uuid!r:.80} is kept: send its data again"
            )
        return Media(source.kind, None, hash=name, processed=processed)

    def _remember(self, key: tuple[str, str, str], name: bytes) -> None:
        self._names[key] = name
        self._names.move_to_end(key)
        while len(self._names) > _NAMES:
            self._names.popitem(last=False)

    def close(self) -> None:
        """End the processes that decode."""
        self.workers.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def limits_of(flags: MediaConfig, own: bool) -> Limits:
    """What is decoded at most."""
    if own:
        return OWN
    return Limits(
        pixels=flags.max_image_pixels,
        seconds=flags.max_audio_decode_duration_s,
        frames=flags.max_video_frames,
    )


def _size(value: Image | Sound | Video | None) -> int:
    """Bytes of a value."""
    if isinstance(value, Sound):
        return value.samples.nbytes
    if isinstance(value, Video):
        return value.frames.nbytes
    return 0 if value is None else 3 * value.width * value.height
