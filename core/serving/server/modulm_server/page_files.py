"""Serves the web page files inside a route family's package."""

from __future__ import annotations

import gzip
import hashlib
from functools import cached_property
from typing import TYPE_CHECKING

from attrs import define, field, frozen
from starlette.responses import Response

from modulm_server.errors import ApiError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from starlette.requests import Request

__all__ = ["PageFiles", "content_policy"]

#: Media types by suffix. Other files in a package are not served.
_TYPES = {
    "css": "text/css",
    "html": "text/html",
    "js": "text/javascript",
    "mjs": "text/javascript",
    "png": "image/png",
    "svg": "image/svg+xml",
    "txt": "text/plain",
    "woff2": "font/woff2",
}
_PACKED = frozenset({"png", "woff2"})
_LEAST_GZIP = 1024


def content_policy(**sources: str) -> str:
    """Build a Content-Security-Policy that forbids all sources except the given ones."""
    directives = {name.replace("_", "-"): value for name, value in sources.items()}
    rules = {
        "default-src": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        **directives,
    }
    return "; ".join(f"{name} {value}".rstrip() for name, value in rules.items())


@frozen
class _File:
    """A file in memory."""

    plain: bytes
    media_type: str
    packed: bool

    @cached_property
    def gzipped(self) -> bytes:
        return gzip.compress(self.plain, 6, mtime=0)

    @cached_property
    def tag(self) -> str:
        return f'"{hashlib.sha256(self.plain).hexdigest()[:32]}"'


@define(eq=False)
class PageFiles:
    """The files below `folder`, served with a content policy and an ETag for caching.

    Folders, paths outside the folder and files of unknown types are not served.
    """

    folder: Traversable
    policy: str
    _read: dict[str, _File] = field(factory=dict, init=False)

    def response(self, request: Request, name: str) -> Response:
        """A file by its path below the folder. Raises ApiError(404)."""
        file = self._file(name)
        headers = {
            "Content-Security-Policy": self.policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
            "ETag": file.tag,
            "Vary": "Accept-Encoding",
        }
        if file.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        content = file.plain
        accepted = request.headers.get("accept-encoding", "")
        if "gzip" in accepted and not file.packed and len(content) > _LEAST_GZIP:
            headers["Content-Encoding"] = "gzip"
            content = file.gzipped
        return Response(content, headers=headers, media_type=file.media_type)

    def _file(self, name: str) -> _File:
        file = self._read.get(name)
        if file is None:
            file = self._read[name] = self._opened(name)
        return file

    def _opened(self, name: str) -> _File:
        parts = name.split("/")
        ending = name.rpartition(".")[2]
        if ending not in _TYPES or any(part in ("", ".", "..") or "\\" in part for part in parts):
            raise _MISSING
        path = self.folder.joinpath(*parts)
        if not path.is_file():
            raise _MISSING
        return _File(path.read_bytes(), _TYPES[ending], ending in _PACKED)


_MISSING = ApiError(404, "file not found", code="not_found")
