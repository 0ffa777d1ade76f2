"""The route family."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from msgspec import Meta, Struct
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from modulm_route_files.batch import ENDPOINTS, Batch
from modulm_route_files.batch_store import BatchStore
from modulm_route_files.flags import FilesConfig
from modulm_route_files.objects import BatchCard, Deleted, FileCard
from modulm_route_files.store import FileStore, expires_after, no_room
from modulm_server.auth import owner_of
from modulm_server.errors import ApiError
from modulm_server.json_body import bad_field, json_response, read, request_docs
from modulm_server.openapi import response_docs
from modulm_server.paging import Page, page
from modulm_server.route import RouteFamily
from modulm_server.sampling import LIMITS

__all__ = ["Files"]

_PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
#: Files of a page, and batches.
_FILES, _LISTED = 10_000, 100
_UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"enum": list(_PURPOSES)},
                        "expires_after[anchor]": {"enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer"},
                    },
                    "required": ["file", "purpose"],
                }
            }
        },
    }
}
_BATCHES = 1_000


class BatchRequest(Struct, kw_only=True):
    """`POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"] = "24h"
    metadata: (
        Annotated[
            dict[str, Annotated[str, Meta(max_length=LIMITS.metadata_value)]],
            Meta(max_length=LIMITS.metadata),
        ]
        | None
    ) = None
    output_expires_after: dict[str, Any] | None = None


class Files(RouteFamily):
    """`/v1/files` and `/v1/batches`."""

    name = "files"
    api = 2

    def router(self) -> APIRouter:
        given = self.context.config.group(FilesConfig)
        self._files = FileStore(
            _folder(given, self.context.engine.address),
            given.max_stored_files,
            given.max_stored_bytes,
            lasting=given.file_storage_path is not None,
        )
        self._batches = BatchStore(self._files)
        router = APIRouter(prefix="/v1", tags=["Files and batches"])
        file, batch = "/files/{file_id}", "/batches/{batch_id}"
        for method, path, endpoint, answer, extra in (
            ("POST", "/files", self.upload, FileCard, _UPLOAD),
            ("GET", "/files", self.list_files, Page[FileCard], None),
            ("POST", "/batches", self.create, BatchCard, request_docs(BatchRequest)),
            ("GET", "/batches", self.list_batches, Page[BatchCard], None),
        ):
            router.add_api_route(
                path,
                endpoint,
                methods=[method],
                responses=response_docs(answer),
                openapi_extra=extra,
            )
        for method, path, one, card in (
            ("GET", file, self.file, FileCard),
            ("DELETE", file, self.delete, Deleted),
            ("GET", batch, self.batch, BatchCard),
            ("POST", f"{batch}/cancel", self.cancel, BatchCard),
        ):
            router.add_api_route(path, one, methods=[method], responses=response_docs(card))
        router.add_api_route(
            f"{file}/content",
            self.content,
            methods=["GET"],
            response_class=FileResponse,
            responses=response_docs(content="application/octet-stream"),
        )
        return router

    async def start(self) -> None:
        if self._files.lasting:
            self._batches.resume(self._work)

    async def stop(self) -> None:
        await self._batches.stop()
        self._files.close()

    async def _work(self, batch: Batch) -> None:
        await batch.run(self._files, self.context.loopback)

    # Files.

    async def upload(self, request: Request) -> Response:
        """Store a file."""
        kind = request.headers.get("content-type", "")
        if not kind.startswith("multipart/form-data"):
            raise ApiError(415, "a file is sent as multipart/form-data")
        try:
            async with request.form(max_files=1, max_fields=8) as form:
                return await self._keep(request, form)
        except HTTPException as error:
            raise bad_field("file", f"file: {error.detail}") from error
        except OSError as error:
            raise no_room(error) from error

    async def _keep(self, request: Request, form: FormData) -> Response:
        """Store what a form brings. Raises ApiError, OSError."""
        given, purpose = form.get("file"), form.get("purpose")
        if not isinstance(given, UploadFile):
            raise bad_field("file", "file: is missing")
        if purpose not in _PURPOSES:
            raise bad_field("purpose", f"purpose: one of {', '.join(_PURPOSES)}")
        lasts = expires_after(_expiry(form), "expires_after")
        file = self._files.make(owner_of(request), given.filename or "file", purpose, lasts)
        await asyncio.to_thread(self._files.write, file, given.file)
        return json_response(file.card())

    async def list_files(self, request: Request) -> Response:
        """One's own files, of a purpose if that is named."""
        query = request.query_params
        found = [
            file.card()
            for file in self._files.of(owner_of(request))
            if query.get("purpose") in (None, file.purpose)
        ]
        return json_response(page(found, query, default_limit=_FILES, max_limit=_FILES))

    async def file(self, request: Request, file_id: str) -> Response:
        """What is known of a file."""
        return json_response(self._files.get(file_id, owner_of(request)).card())

    async def delete(self, request: Request, file_id: str) -> Response:
        """Delete a file."""
        file = self._files.get(file_id, owner_of(request))
        self._files.remove(file)
        gone: Deleted = {"id": file.id, "object": "file", "deleted": True}
        return json_response(gone)

    async def content(self, request: Request, file_id: str) -> Response:
        """What is in a file."""
        file = self._files.get(file_id, owner_of(request))
        headers = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "sandbox"}
        return FileResponse(
            file.path,
            headers=headers,
            media_type="application/octet-stream",
            filename=f"{file.id}.jsonl" if file.purpose.startswith("batch") else file.id,
        )

    # Batches.

    async def create(self, request: Request) -> Response:
        """Begin a batch."""
        body = await read(request, BatchRequest)
        self.context.generation.check_open()
        if body.endpoint not in ENDPOINTS:
            raise bad_field("endpoint", f"endpoint: one of {', '.join(ENDPOINTS)}")
        owner = owner_of(request)
        source = self._files.get(body.input_file_id, owner, "input_file_id")
        if source.purpose != "batch":
            raise bad_field("input_file_id", "input_file_id: a file of purpose batch is needed")
        lasts = expires_after(body.output_expires_after, "output_expires_after")
        if self._batches.running >= _BATCHES:
            raise ApiError(429, "too many batches are running", code="overloaded")
        batch = Batch(owner, body.endpoint, body.completion_window, source.id, body.metadata, lasts)
        card = batch.card()
        try:
            self._batches.begin(batch, self._work)
        except OSError as error:
            raise no_room(error) from error
        return json_response(card)

    async def list_batches(self, request: Request) -> Response:
        """One's own batches, the newest first."""
        owner = owner_of(request)
        found = [batch.card() for batch in self._batches.all() if batch.owner == owner]
        return json_response(page(found, request.query_params, max_limit=_LISTED))

    async def batch(self, request: Request, batch_id: str) -> Response:
        """How far a batch is."""
        return json_response(self._batch(request, batch_id).card())

    async def cancel(self, request: Request, batch_id: str) -> Response:
        """End a batch; answers that are there stay."""
        batch = self._batch(request, batch_id)
        try:
            await self._batches.cancel(batch)
        except OSError as error:
            raise no_room(error) from error
        return json_response(batch.card())

    def _batch(self, request: Request, batch_id: str) -> Batch:
        batch = self._batches.get(batch_id)
        if batch is None or batch.owner != owner_of(request):
            raise ApiError(404, f"there is no batch {batch_id[:64]!r}", code="not_found")
        return batch


def _folder(given: FilesConfig, address: str | None) -> Path | None:
    """The folder of the files: what the flag says, else beside the engine's socket, where all
    server processes of one service look and which goes with it. None where there is no socket.
    """
    if given.file_storage_path is not None:
        return Path(given.file_storage_path)
    return None if address is None else Path(address).parent


def _expiry(form: Mapping[str, Any]) -> dict[str, Any] | None:
    """`expires_after` as forms spell an object: one field for each of its keys."""
    found: dict[str, Any] = {
        key: form.get(f"expires_after[{key}]")
        for key in ("anchor", "seconds")
        if f"expires_after[{key}]" in form
    }
    seconds = found.get("seconds")
    if isinstance(seconds, str) and seconds.isascii() and seconds.isdigit():
        found["seconds"] = int(seconds[:9])
    if "expires_after" in form:
        raise bad_field("expires_after", "expires_after: send expires_after[anchor] and [seconds]")
    return found or None
