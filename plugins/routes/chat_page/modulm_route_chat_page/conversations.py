"""Conversations of the chat page in a SQLite file, apart for each API key (`--chat-store`)."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta, Struct
from starlette.responses import Response

from modulm.errors import ConfigError
from modulm_server.auth import owner_of
from modulm_server.errors import ApiError
from modulm_server.json_body import bad_field, json_response, read
from modulm_server.pacing import FairSemaphore

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ConversationStore", "Conversations"]

#: Maximum conversations of a key, and their bytes. The oldest deleted ones make room for others.
_MOST, _MOST_BYTES = 10_000, 1 << 30
#: Threads that read and write at once: others of the process have work, too.
_AT_ONCE = 2
#: The version of the file, in its `user_version`.
FORMAT = 1
_TABLE = """
CREATE TABLE IF NOT EXISTS conversations (
  owner TEXT NOT NULL, id TEXT NOT NULL, updated REAL NOT NULL, body BLOB,
  PRIMARY KEY (owner, id)
)"""


class ConversationBody(Struct, kw_only=True):
    """`PUT /chat_page/conversations/{id}`. updated: milliseconds since 1970, as the page has it."""

    updated: Annotated[float, Meta(ge=0, le=2**53)]
    conversation: dict[str, Any] | None = None


class ConversationStore:
    """The file. Whoever writes last wins; a deleted conversation stays as a row without a body."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            Path(path).chmod(0o600)  # before SQLite makes files beside it, with the same mode
            with closing(self._open()) as db, db:
                (version,) = db.execute("PRAGMA user_version").fetchone()
                if version > FORMAT:
                    message = f"has format {version}, this modulm reads up to {FORMAT}"
                    raise ConfigError("chat_store", f"{path}: {message}: use a newer release")
                db.execute("PRAGMA journal_mode=WAL")
                db.execute(_TABLE)
                db.execute(f"PRAGMA user_version={FORMAT}")
        except (sqlite3.Error, OSError) as error:
            raise ConfigError("chat_store", f"{path}: {error}") from error

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=10)

    def listed(self, owner: str) -> list[dict[str, Any]]:
        """The conversations of an owner: id, when they were changed, whether they are deleted."""
        with closing(self._open()) as db:
            rows = db.execute(
                "SELECT id, updated, body IS NULL FROM conversations WHERE owner = ? ORDER BY id",
                (owner,),
            )
            return [{"id": i, "updated": u, "deleted": bool(gone)} for i, u, gone in rows]

    def get(self, owner: str, name: str) -> bytes | None:
        """Return a conversation as JSON."""
        with closing(self._open()) as db:
            row = db.execute(
                "SELECT body FROM conversations WHERE owner = ? AND id = ?", (owner, name)
            ).fetchone()
        return None if row is None else row[0]

    def put(self, owner: str, name: str, updated: float, body: bytes | None) -> bool:
        """Write a conversation, or None for a deleted one, unless the file has a newer one.

        Returns False if the owner has too many, or too large ones.
        """
        with closing(self._open()) as db, db:
            db.execute("BEGIN IMMEDIATE")
            count, deleted, size = db.execute(
                "SELECT count(*), coalesce(sum(body IS NULL), 0), coalesce(sum(length(body)), 0) "
                "FROM conversations WHERE owner = ? AND id != ?",
                (owner, name),
            ).fetchone()
            if count - deleted >= _MOST or (body and size + len(body) > _MOST_BYTES):
                return False
            if count >= _MOST:
                db.execute(
                    "DELETE FROM conversations WHERE rowid IN (SELECT rowid FROM conversations "
                    "WHERE owner = ? AND id != ? AND body IS NULL ORDER BY updated LIMIT ?)",
                    (owner, name, count - _MOST + 1),
                )
            db.execute(
                "INSERT INTO conversations VALUES (?, ?, ?, ?) ON CONFLICT (owner, id) DO UPDATE "
                "SET updated = excluded.updated, body = excluded.body "
                "WHERE excluded.updated >= updated",
                (owner, name, updated, body),
            )
        return True


class Conversations:
    """The routes of the store."""

    def __init__(self, store: ConversationStore) -> None:
        self._store = store
        self._free = FairSemaphore(_AT_ONCE)

    def add_routes(self, router: APIRouter) -> None:
        """Add the routes to the page's."""
        base = "/chat_page/conversations"
        for method, path, endpoint in (
            ("GET", base, self.listed),
            ("GET", f"{base}/{{name}}", self.one),
            ("PUT", f"{base}/{{name}}", self.put),
        ):
            router.add_api_route(path, endpoint, methods=[method], include_in_schema=False)

    async def listed(self, request: Request) -> Response:
        """List the conversations of the key."""
        return json_response({"data": await self._run(request, self._store.listed)})

    async def one(self, request: Request, name: str) -> Response:
        """Return a conversation."""
        body = await self._run(request, self._store.get, name)
        if body is None:
            raise ApiError(404, "no such conversation", code="not_found")
        return Response(body, media_type="application/json")

    async def put(self, request: Request, name: str) -> Response:
        """Store or delete a conversation."""
        given = await read(request, ConversationBody)
        if len(name) > 100:
            raise bad_field("id", "id has more than 100 characters")
        if not await self._run(request, self._write, name, given):
            raise ApiError(
                413,
                f"a key may store {_MOST} conversations and {_MOST_BYTES} bytes: delete some",
                code="chat_store_full",
            )
        return json_response({"id": name, "updated": given.updated})

    def _write(self, owner: str, name: str, given: ConversationBody) -> bool:
        body = None if given.conversation is None else msgspec.json.encode(given.conversation)
        return self._store.put(owner, name, given.updated, body)

    async def _run(self, request: Request, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function for the request's key, in a thread. Each key has its turn."""
        owner = owner_of(request)
        await self._free.acquire(owner)
        try:
            return await asyncio.to_thread(function, owner, *arguments)
        except (sqlite3.Error, OSError) as error:
            raise ApiError(500, "the chat store cannot be used", code="chat_store") from error
        finally:
            self._free.release()
