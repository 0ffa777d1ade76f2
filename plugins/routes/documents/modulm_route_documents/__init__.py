"""`POST /v1/documents`: a PDF or an office file as text, and its pages as images."""

from __future__ import annotations

import asyncio
import base64
import binascii
import sys
from asyncio.subprocess import DEVNULL, PIPE
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, TypedDict

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from modulm_route_documents import reader
from modulm_server.auth import owner_of
from modulm_server.errors import ApiError
from modulm_server.json_body import bad_field, convert, read, request_docs
from modulm_server.openapi import response_docs
from modulm_server.pacing import FairSemaphore
from modulm_server.route import RouteFamily

__all__ = ["Documents"]

#: Documents that are read at once, and seconds for one, with the start of its process.
_AT_ONCE, _SECONDS = 2, 120.0
#: What a reader's process has of this one's environment: no keys, no tokens.
_ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


class DocumentRequest(msgspec.Struct, kw_only=True):
    """name: of the file, whose ending says what it is. data: its bytes in base64. pages: how many
    of the first pages of a PDF are to be images.
    """

    name: str
    data: str
    pages: Annotated[int, Meta(ge=0, le=256)] = 0


class Document(TypedDict):
    """text: of the whole document, or its beginning. truncated: whether there is more of it. pages:
    URLs of JPEG images.
    """

    text: str
    truncated: bool
    pages: list[str]


class Documents(RouteFamily):
    """Documents as text. Each is read in a process of its own, with limits, that ends with it."""

    name = "documents"
    api = 2
    shared_paths = ("*",)

    def router(self) -> APIRouter:
        self._free = FairSemaphore(_AT_ONCE)
        router = APIRouter(tags=["Documents"])
        router.add_api_route(
            "/v1/documents",
            self.read,
            methods=["POST"],
            openapi_extra=request_docs(DocumentRequest),
            responses=response_docs(Document),
        )
        return router

    async def read(self, request: Request) -> Response:
        """Read a PDF, Word, Excel or PowerPoint file (`.pdf`, `.docx`, `.xlsx`, `.pptx`)."""
        body = await read(request, DocumentRequest)
        kind = body.name.rpartition(".")[2].lower()
        if kind not in reader.KINDS:
            raise bad_field("name", f"the name must end in one of {', '.join(reader.KINDS)}")
        try:
            data = await convert(request, partial(base64.b64decode, body.data, validate=True))
        except binascii.Error:
            raise bad_field("data", "data must be base64") from None
        await self._free.acquire(owner_of(request))
        try:
            answer = await _read(kind, data, body.pages)
        finally:
            self._free.release()
        error, document = await asyncio.to_thread(_document, answer)
        if error is not None:
            raise bad_field("data", f"{body.name[:200]} cannot be read: {error[:500]}")
        return Response(document, media_type="application/json")


def _document(answer: bytes) -> tuple[str | None, bytes]:
    """Why a document cannot be read, or the response to send."""
    read: dict[str, Any] = msgspec.json.decode(answer)
    if "error" in read:
        return str(read["error"]), b""
    document: Document = {
        "text": read["text"],
        "truncated": read["truncated"],
        "pages": [f"data:image/jpeg;base64,{page}" for page in read["pages"]],
    }
    return None, msgspec.json.encode(document)


async def _read(kind: str, data: bytes, pages: int) -> bytes:
    """What the process that reads a document writes. Raises ApiError if it takes too long or too
    much memory.
    """
    command = [sys.executable, "-P", reader.__file__, kind, str(pages)]  # without this package
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=_ENVIRONMENT
    )
    try:
        written = await asyncio.wait_for(_exchange(process, data), _SECONDS)
    except TimeoutError:
        raise bad_field("data", f"the document takes more than {_SECONDS:g} s to read") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode or not written:
        raise ApiError(
            400,
            "the document needs too much memory or time, or its reader failed",
            param="data",
            code="unreadable_document",
        )
    return written


async def _exchange(process: asyncio.subprocess.Process, data: bytes) -> bytes:
    """Send a process its input; returns its output, or nothing if it is longer than any answer."""
    pipe, source = process.stdin, process.stdout
    if pipe is None or source is None:
        raise OSError("the process has no pipes")

    async def send() -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it needs no more
            pipe.write(data)
            await pipe.drain()
        pipe.close()

    pieces, size = [], 0
    sending = asyncio.ensure_future(send())
    try:
        while piece := await source.read(1 << 16):
            size += len(piece)
            if size > reader.MOST_BYTES:
                return b""
            pieces.append(piece)
        await sending
    finally:
        sending.cancel()
    await process.wait()
    return b"".join(pieces)
