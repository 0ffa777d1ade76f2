"""Fetch media files from https:, data: and file: URLs.

A host name is resolved once, its addresses are checked, and the connection is made to one of them,
so that the name cannot resolve differently in between. Proxies from the environment are ignored.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import stat
from functools import cached_property
from pathlib import Path
from ssl import SSLContext
from urllib.parse import unquote

import httpx

from modulm_media.addresses import Hosts
from modulm_media.flags import MediaConfig, MediaKind
from modulm_media.limits import Undecodable
from modulm_media.memory import Reservation

__all__ = ["Budget", "Fetcher", "from_base64"]

_HOPS = 5
_MB = 1_000_000
#: Base64 up to this many characters is decoded on the event loop.
_INLINE = 1 << 16
_ACCEPT = {"image": "image/*,*/*;q=0.5", "audio": "audio/*,*/*;q=0.5", "video": "video/*,*/*;q=0.5"}


class Budget:
    """Bytes that one request's files may still use. each: limit per file in bytes."""

    def __init__(self, flags: MediaConfig, reservation: Reservation | None = None) -> None:
        self._reservation = reservation
        self.each = flags.max_media_download_size_mb * _MB
        self._left = self._all = flags.max_media_request_download_size_mb * _MB

    def check(self, size: int) -> None:
        """Raise Undecodable if a file of this size would exceed a limit; nothing is counted yet."""
        if size > self.each:
            raise Undecodable(f"more than {self.each // _MB} MB (--max-media-download-size-mb)")
        if size > self._left:
            raise Undecodable(
                f"more than {self._all // _MB} MB of media in a request "
                "(--max-media-request-download-size-mb)"
            )

    def take(self, size: int) -> None:
        """Count bytes before they are stored. Raises Undecodable, or QueueFull."""
        self.check(size)
        if self._reservation is not None:
            self._reservation.take(size)
        self._left -= size


class Fetcher:
    """Reads files by URL. any_file: allow any local file."""

    def __init__(self, flags: MediaConfig, any_file: bool = False) -> None:
        self._flags, self._any_file = flags, any_file
        self._hosts = Hosts(flags)
        self._seconds: dict[MediaKind, float] = {
            "image": flags.image_fetch_timeout,
            "audio": flags.audio_fetch_timeout,
            "video": flags.video_fetch_timeout,
        }

    def close(self) -> None:
        """End the threads of the fetcher."""
        self._hosts.close()

    async def get(self, url: str, kind: MediaKind, budget: Budget) -> bytes:
        """Fetch a file.

        Raises Undecodable; its message says what is wrong without revealing the content.
        """
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return await from_base64(_data_of(url), budget)
        if scheme == "file":
            return await asyncio.to_thread(self._file, url, budget)
        seconds = self._seconds[kind]
        try:
            async with asyncio.timeout(seconds):
                return await self._fetched(self._hosts.parsed(url), kind, budget)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise Undecodable(f"it was not received within {seconds:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
            raise Undecodable("its host did not answer with valid HTTP") from error

    async def _fetched(self, url: httpx.URL, kind: MediaKind, budget: Budget) -> bytes:
        for _ in range(_HOPS + 1):
            response = await self._hop(url, kind, budget)
            if isinstance(response, bytes):
                return response
            if not self._flags.media_url_allow_redirects:
                raise Undecodable("its host redirects (see --media-url-allow-redirects)")
            url = self._hosts.checked(response)
        raise Undecodable(f"more than {_HOPS} redirects")

    async def _hop(self, url: httpx.URL, kind: MediaKind, budget: Budget) -> bytes | httpx.URL:
        """Return the file, or the URL it is redirected to."""
        failed: httpx.ConnectError | None = None
        for address in await self._hosts.resolved(url):
            try:
                return await self._request(url, address, kind, budget)
            except httpx.ConnectError as error:
                failed = error
        raise failed or httpx.ConnectError("no address")

    async def _request(
        self, url: httpx.URL, address: str, kind: MediaKind, budget: Budget
    ) -> bytes | httpx.URL:
        headers = {
            "Host": url.netloc.decode("ascii"),
            "Accept": _ACCEPT[kind],
            "Accept-Encoding": "identity",
            "User-Agent": "modulm",
        }
        name = url.raw_host.decode("ascii")
        client = httpx.AsyncClient(
            verify=self._context,
            trust_env=False,
            follow_redirects=False,
            timeout=self._seconds[kind],
        )
        async with (
            client,
            client.stream(
                "GET",
                url.copy_with(host=address, fragment=None),
                headers=headers,
                extensions={"sni_hostname": name},
            ) as answer,
        ):
            if answer.is_redirect and "location" in answer.headers:
                return url.join(answer.headers["location"])
            if answer.status_code != 200:
                raise Undecodable(f"its host answered {answer.status_code}")
            if answer.headers.get("content-encoding", "identity").lower() != "identity":
                raise Undecodable(
                    "its host compressed it, although identity encoding was requested"
                )
            stated = answer.headers.get("content-length", "0")
            budget.check(int(stated) if stated.isdigit() else 0)
            pieces, size = [], 0
            async for piece in answer.aiter_raw():
                size += len(piece)
                if size > budget.each:
                    budget.check(size)
                budget.take(len(piece))
                pieces.append(piece)
            return b"".join(pieces)

    @cached_property
    def _context(self) -> SSLContext:
        return httpx.create_ssl_context(trust_env=False)

    def _file(self, url: str, budget: Budget) -> bytes:
        """Read a file below the allowed folder."""
        root = self._flags.allowed_local_media_path
        if root is None and not self._any_file:
            raise Undecodable(
                "this server does not read local files (see --allowed-local-media-path)"
            )
        host, slash, path = url[len("file:") :].removeprefix("//").partition("/")
        if host not in ("", "localhost") or not slash:
            raise Undecodable("file:///PATH is expected")
        outside = Undecodable("no such file below --allowed-local-media-path")
        try:
            file = Path("/" + unquote(path)).resolve(strict=True)
            if root is not None and not file.is_relative_to(Path(root).resolve()):
                raise outside
            return _read(file, budget)
        except (OSError, ValueError) as error:
            if isinstance(error, Undecodable):
                raise
            raise outside from error


def _read(file: Path, budget: Budget) -> bytes:
    """Read a regular file; symbolic links swapped in meanwhile are not followed."""
    with open(file, "rb", opener=_without_links) as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a regular file")
        budget.take(status.st_size)
        return opened.read(status.st_size)


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _data_of(url: str) -> str:
    head, comma, data = url[:512].partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise Undecodable("data: URLs are data:TYPE;base64,DATA")
    return url[len(head) + 1 :] if data or len(url) > len(head) + 1 else ""


async def from_base64(data: str, budget: Budget) -> bytes:
    """Decode base64. Raises Undecodable."""
    budget.take(len(data) * 3 // 4 - data[-2:].count("="))
    try:
        if len(data) <= _INLINE:
            data_bytes = base64.b64decode(data, validate=True)
        else:
            data_bytes = await asyncio.to_thread(base64.b64decode, data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Undecodable("it is not base64") from error
    if not data_bytes:
        raise Undecodable("it is empty")
    return data_bytes
