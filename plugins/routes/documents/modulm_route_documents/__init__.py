"""`POST /v1/documents`: a PDF or an office file as text, and its pages as images."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE
from typing import Annotated, Any, TypedDict

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from modulm_route_documents import reader
from modulm_server.errors import ApiError
from modulm_server.json_body import bad_field, json_response, read, request_docs
from modulm_server.openapi import response_docs
from modulm_server.route import RouteFamily

__all__ = ["Documents"]

#: Documents that are read at once, and seconds for one, with the start of its process.
_AT_ONCE, _SECONDS = 2, 120.0
#: Most characters of a text.
_MOST = 4 << 20


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
        self._free = asyncio.Semaphore(_AT_ONCE)
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
            data = base64.b64decode(body.data, validate=True)
        except binascii.Error:
            raise bad_field("data", "data must be base64") from None
        async with self._free:
            answer = await _read(kind, data, body.pages)
        if "error" in answer:
            raise bad_field("data", f"{body.name[:200]} cannot be read: {answer['error'][:500]}")
        text: str = answer["text"]
        document: Document = {
            "text": text[:_MOST],
            "truncated": len(text) > _MOST,
            "pages": [f"data:image/jpeg;base64,{page}" for page in answer["pages"]],
        }
        return json_response(document)


async def _read(kind: str, data: bytes, pages: int) -> dict[str, Any]:
    """Read a document in a process. Raises ApiError if it takes too long or too much memory."""
    command = [sys.executable, "-P", reader.__file__, kind, str(pages)]  # without this package
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL
    )
    try:
        written, _ = await asyncio.wait_for(process.communicate(data), _SECONDS)
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
    answer: dict[str, Any] = json.loads(written)
    return answer
