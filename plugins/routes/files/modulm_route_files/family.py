"""The route family of files and batches."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
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
from modulm_route_files.lines import LinesError, check_lines
from modulm_route_files.objects import BatchCard, Deleted, FileCard
from modulm_route_files.slots import Slots
from modulm_route_files.store import FileStore, check_format, expires_after, storage_error
from modulm_server.api_keys import read_keys
from modulm_server.auth import owner_of
from modulm_server.errors import ApiError
from modulm_server.flags import ServerConfig
from modulm_server.json_body import bad_field, json_response, read, request_docs
from modulm_server.openapi import response_docs
from modulm_server.paging import Page, page
from modulm_server.route import RouteFamily
from modulm_server.sampling import LIMITS

__all__ = ["Files"]

log = logging.getLogger("modulm_server")

_PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
#: Maximum files and maximum batches per page.
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
#: Maximum batches that run in this process, an equal share of them for each key.
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
    shared_paths = ("*",)

    def absent(self) -> str | None:
        config = self.context.config
        folder = _folder(config.group(FilesConfig), self.context.engine.address)
        if folder is None and (config.group(ServerConfig).api_server_count or 1) > 1:
            return "several server processes before replicas need --file-storage-path to share"
        return None

    def router(self) -> APIRouter:
        flags = self.context.config.group(FilesConfig)
        if flags.file_storage_path is not None:
            check_format(Path(flags.file_storage_path))
        owners = len(read_keys(self.context.config.group(ServerConfig))) or 1
        self._files = FileStore(
            _folder(flags, self.context.engine.address),
            flags.max_stored_files,
            flags.max_stored_bytes,
            lasting=flags.file_storage_path is not None,
            owners=owners,
        )
        self._batches = BatchStore(self._files)
        self._max_batches = max(1, _BATCHES // owners)
        self._slots: defaultdict[str, Slots] = defaultdict(
            lambda: Slots(lambda: self.context.loopback.answers.recent)
        )
        self._line_limit = self.context.config.group(ServerConfig).max_request_bytes
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
            await asyncio.to_thread(self._remove_leftovers)
            self._batches.resume(self._work)

    def _remove_leftovers(self) -> None:
        try:
            self._files.remove_leftovers()
            self._batches.remove_leftovers()
        except OSError as error:
            log.warning("The folder of stored files cannot be tidied: %s", error.strerror)

    async def stop(self) -> None:
        await self._batches.stop()
        self._files.close()

    async def _work(self, batch: Batch) -> None:
        await batch.run(self._files, self.context.loopback, self._slots[batch.owner])

    # Files.

    async def upload(self, request: Request) -> Response:
        """Store a file."""
        kind = request.headers.get("content-type", "")
        if not kind.startswith("multipart/form-data"):
            raise ApiError(415, "send the file as multipart/form-data")
        try:
            async with request.form(max_files=1, max_fields=8) as form:
                return await self._store(request, form)
        except HTTPException as error:
            raise bad_field("file", f"file: {error.detail}") from error
        except OSError as error:
            raise storage_error(error) from error

    async def _store(self, request: Request, form: FormData) -> Response:
        """Store the file of a form. Raises ApiError, OSError."""
        upload, purpose = form.get("file"), form.get("purpose")
        if not isinstance(upload, UploadFile):
            raise bad_field("file", "file is missing")
        if purpose not in _PURPOSES:
            raise bad_field("purpose", f"purpose must be one of {', '.join(_PURPOSES)}")
        lasts = expires_after(_expiry(form), "expires_after")
        name = upload.filename or "file"
        file = await asyncio.to_thread(self._files.make, owner_of(request), name, purpose, lasts)
        if purpose == "batch":
            try:
                await asyncio.to_thread(check_lines, upload.file, self._line_limit)
            except LinesError as error:
                raise bad_field("file", f"file: {error}") from error
            await upload.seek(0)
        await asyncio.to_thread(self._files.write, file, upload.file)
        return json_response(file.card())

    async def list_files(self, request: Request) -> Response:
        """List one's own files, optionally of one purpose."""
        query, owner = request.query_params, owner_of(request)

        def describe() -> list[FileCard]:
            files = self._files.list_owned(owner)
            return [file.card() for file in files if query.get("purpose") in (None, file.purpose)]

        cards = await asyncio.to_thread(describe)
        return json_response(page(cards, query, default_limit=_FILES, max_limit=_FILES))

    async def file(self, request: Request, file_id: str) -> Response:
        """Describe a file."""
        file = await asyncio.to_thread(self._files.get, file_id, owner_of(request))
        return json_response(file.card())

    async def delete(self, request: Request, file_id: str) -> Response:
        """Delete a file."""
        file = await asyncio.to_thread(self._files.get, file_id, owner_of(request))
        await asyncio.to_thread(self._files.remove, file)
        deleted: Deleted = {"id": file.id, "object": "file", "deleted": True}
        return json_response(deleted)

    async def content(self, request: Request, file_id: str) -> Response:
        """Download a file."""
        file = await asyncio.to_thread(self._files.get, file_id, owner_of(request))
        headers = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "sandbox"}
        return FileResponse(
            file.path,
            headers=headers,
            media_type="application/octet-stream",
            filename=f"{file.id}.jsonl" if file.purpose.startswith("batch") else file.id,
        )

    # Batches.

    async def create(self, request: Request) -> Response:
        """Create a batch."""
        body = await read(request, BatchRequest)
        self.context.generation.check_open()
        if body.endpoint not in ENDPOINTS:
            raise bad_field("endpoint", f"endpoint must be one of {', '.join(ENDPOINTS)}")
        owner = owner_of(request)
        source = await asyncio.to_thread(
            self._files.get, body.input_file_id, owner, "input_file_id"
        )
        if source.purpose != "batch":
            raise bad_field("input_file_id", "input_file_id must be a file of purpose batch")
        lasts = expires_after(body.output_expires_after, "output_expires_after")
        if self._batches.count_running(owner) >= self._max_batches:
            raise ApiError(429, "too many batches of this key are running", code="overloaded")
        batch = Batch(
            owner,
            body.endpoint,
            body.completion_window,
            source.id,
            body.metadata,
            lasts,
            line_limit=self._line_limit,
        )
        card = batch.card()
        try:
            await self._batches.create(batch, self._work)
        except OSError as error:
            raise storage_error(error) from error
        return json_response(card)

    async def list_batches(self, request: Request) -> Response:
        """List one's own batches, newest first."""
        owner = owner_of(request)
        batches = await asyncio.to_thread(self._batches.all)
        cards = [batch.card() for batch in batches if batch.owner == owner]
        return json_response(page(cards, request.query_params, max_limit=_LISTED))

    async def batch(self, request: Request, batch_id: str) -> Response:
        """Describe a batch and its progress."""
        return json_response((await self._batch(request, batch_id)).card())

    async def cancel(self, request: Request, batch_id: str) -> Response:
        """Cancel a batch. Its responses so far are kept."""
        batch = await self._batch(request, batch_id)
        try:
            await self._batches.cancel(batch)
        except OSError as error:
            raise storage_error(error) from error
        return json_response(batch.card())

    async def _batch(self, request: Request, batch_id: str) -> Batch:
        batch = await asyncio.to_thread(self._batches.get, batch_id)
        if batch is None or batch.owner != owner_of(request):
            raise ApiError(404, f"no batch {batch_id[:64]!r}", code="not_found")
        return batch


def _folder(flags: FilesConfig, address: str | None) -> Path | None:
    """The folder of the files: by flag, or beside the engine's socket, which all server processes
    share and which is removed with the service. None without a socket, and for replicas, whose
    sockets' folders are removed when they restart.
    """
    if flags.file_storage_path is not None:
        return Path(flags.file_storage_path)
    return Path(address).parent if address and address.startswith("/") else None


def _expiry(form: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read `expires_after` from a form, which has one field per key."""
    expiry: dict[str, Any] = {
        key: form.get(f"expires_after[{key}]")
        for key in ("anchor", "seconds")
        if f"expires_after[{key}]" in form
    }
    seconds = expiry.get("seconds")
    if isinstance(seconds, str) and seconds.isascii() and seconds.isdigit():
        expiry["seconds"] = int(seconds[:9])
    if "expires_after" in form:
        raise bad_field("expires_after", "expires_after: send expires_after[anchor] and [seconds]")
    return expiry or None
