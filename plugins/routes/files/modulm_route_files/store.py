"""Uploaded and produced files: on disk under random names, and only for their owner."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from attrs import define

from modulm_server.errors import ApiError

if TYPE_CHECKING:
    pass

__all__ = ["FileStore", "StoredFile"]

#: Files and bytes that are kept at most.
MAX_FILES = 1_000
MAX_BYTES = 4 << 30


@define(eq=False)
class StoredFile:
    """A file. `name` is the client's, and is never used as a path."""

    id: str
    owner: str
    name: str
    purpose: str
    path: Path
    created: int
    size: int = 0

    def card(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
        }


class FileStore:
    """A folder of its own, made when it is needed, gone with the server."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._files: dict[str, StoredFile] = {}

    def make(self, owner: str, name: str, purpose: str) -> StoredFile:
        """An empty file to be written. Raises ApiError(429) when there are too many."""
        used = sum(file.size for file in self._files.values())
        if len(self._files) >= MAX_FILES or used >= MAX_BYTES:
            raise ApiError(429, "too many files are stored: delete some", code="overloaded")
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="modulm-files-"))
        identity = f"file-{uuid4().hex}"
        file = StoredFile(
            identity, owner, name[:255], purpose, self._folder / identity, int(time.time())
        )
        self._files[identity] = file
        return file

    def get(self, identity: Any, owner: str, param: str | None = None) -> StoredFile:
        """A file by its whole id. Raises ApiError(404), also for somebody else's."""
        file = self._files.get(identity) if isinstance(identity, str) else None
        if file is None or file.owner != owner:
            raise ApiError(404, f"there is no file {str(identity)[:64]!r}", param=param)
        return file

    def of(self, owner: str) -> list[StoredFile]:
        """Everything that somebody owns, the newest first."""
        return [file for file in reversed(self._files.values()) if file.owner == owner]

    def remove(self, file: StoredFile) -> None:
        """Delete a file."""
        self._files.pop(file.id, None)
        file.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Delete everything."""
        self._files.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
