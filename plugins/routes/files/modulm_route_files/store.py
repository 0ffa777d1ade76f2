"""Stores uploaded and generated files on disk under random names, accessible only to their owner.

Each file has a card with its metadata. The card is written last and atomically, so that a file
either exists completely or was never acknowledged. Several servers may share a folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
from attrs import define

from modulm.errors import ConfigError
from modulm_server.errors import ApiError
from modulm_server.json_body import bad_field

if TYPE_CHECKING:
    from collections.abc import Mapping

    from modulm_route_files.objects import FileCard

__all__ = [
    "FileStore",
    "StoredFile",
    "check_format",
    "expires_after",
    "storage_error",
    "write_atomically",
]

#: Version of the format of files and batches on disk; releases read this one and older ones.
FORMAT = 1

#: Minimum and maximum of `expires_after` in seconds: an hour and thirty days.
_SHORTEST, _LONGEST = 3_600, 2_592_000
#: OpenAI's defaults: batch files expire after thirty days, others never.
_USUAL = {"batch": _LONGEST}
_PIECE = 1 << 20


@define(eq=False)
class StoredFile:
    """A stored file.

    name: the client's file name, never used as a path. lasts: lifetime in seconds, None for no
    limit. made: time of creation in nanoseconds of Unix time; since: the same on the monotonic
    clock, in seconds.
    """

    id: str
    owner: str
    name: str
    purpose: str
    path: Path
    made: int
    since: float
    lasts: int | None = None

    @property
    def created(self) -> int:
        """Time of creation in seconds of Unix time."""
        return self.made // 1_000_000_000

    @property
    def expired(self) -> bool:
        """Whether its lifetime is over."""
        return self.lasts is not None and time.monotonic() >= self.since + self.lasts

    @property
    def size(self) -> int:
        """Size in bytes; 0 if the file was deleted."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def card(self) -> FileCard:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created,
            "expires_at": None if self.lasts is None else self.created + self.lasts,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
        }


def expires_after(value: Mapping[str, Any] | None, where: str) -> int | None:
    """Read OpenAI's `expires_after` from the field `where`. Raises ApiError(400)."""
    if value is None:
        return None
    seconds = value.get("seconds")
    if value.get("anchor") != "created_at":
        raise bad_field(where, f"{where}.anchor must be created_at")
    if not isinstance(seconds, int) or not _SHORTEST <= seconds <= _LONGEST:
        raise bad_field(where, f"{where}.seconds must be a number from {_SHORTEST} to {_LONGEST}")
    return seconds


def storage_error(error: OSError) -> ApiError:
    """The error for a client when storing fails."""
    reason = error.strerror or "the disk cannot be used"
    return ApiError(507, f"storing failed: {reason}", code="insufficient_storage")


def write_atomically(path: Path, content: bytes, lasting: bool) -> None:
    """Write or replace a file atomically. lasting: flush it to the disk."""
    fresh = path.with_name(f"{path.name}.{uuid4().hex}.new")
    try:
        with fresh.open("wb") as target:
            target.write(content)
            _flush(target, lasting)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def check_format(folder: Path) -> None:
    """Check that this release reads what is in a folder, and note the format of what it writes.

    Folders without a note have the first format. Raises ConfigError for a newer one.
    """
    note = folder / "format.json"
    version: Any = 0
    try:
        version = msgspec.json.decode(note.read_bytes())["version"]
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError("file_storage_path", f"{note} cannot be read: {error}") from error
    if type(version) is not int or version > FORMAT:
        raise ConfigError(
            "file_storage_path",
            f"{folder} was written by a newer release (format {version!r}, this one reads up to "
            f"{FORMAT}): start that release, or use another folder",
        )
    if version < FORMAT:
        with suppress(OSError):  # uploads report a folder that cannot be written
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(note, msgspec.json.encode({"version": FORMAT}), lasting=True)


def _flush(target: IO[bytes], lasting: bool) -> None:
    target.flush()
    if lasting:
        os.fsync(target.fileno())


class FileStore:
    """Files in a folder, by default a temporary one.

    max_files, max_bytes: limits of stored files, shared equally by the owners. lasting: the files
    are kept after the server ends. owners: number of owners.
    """

    def __init__(
        self,
        folder: Path | None,
        max_files: int,
        max_bytes: int,
        *,
        lasting: bool,
        owners: int = 1,
    ) -> None:
        self.lasting = lasting
        self._temporary = folder is None
        self._folder = folder
        self._max_files = max(1, max_files // owners)
        self._max_bytes = max(1, max_bytes // owners)
        self._files: dict[str, StoredFile] = {}
        # Uploads are written in threads.
        self._lock = threading.RLock()

    @property
    def folder(self) -> Path:
        """The folder, created on first use. Raises OSError."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="modulm-files-"))
        for part in ("files", "batches"):
            (self._folder / part).mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._folder

    def make(self, owner: str, name: str, purpose: str, lasts: int | None = None) -> StoredFile:
        """Create a file entry, to be written to its path and then published with `keep`.

        lasts: lifetime in seconds; the default depends on the purpose. Raises ApiError(429) if the
        owner stores too many files, OSError.
        """
        stored = self.list_owned(owner)
        used = sum(file.size for file in stored)
        if len(stored) >= self._max_files or used >= self._max_bytes:
            raise ApiError(429, "too many files are stored: delete some", code="overloaded")
        identity = f"file-{uuid4().hex}"
        return StoredFile(
            identity,
            owner,
            name[:255],
            purpose,
            self.folder / "files" / identity,
            made=int(time.time() * 1e9),
            since=time.monotonic(),
            lasts=_USUAL.get(purpose) if lasts is None else lasts,
        )

    def write(self, file: StoredFile, source: IO[bytes]) -> None:
        """Write a file and publish it; on failure, remove it. Raises OSError."""
        try:
            with file.path.open("wb") as target:
                shutil.copyfileobj(source, target, _PIECE)
                _flush(target, self.lasting)
            self.keep(file)
        except BaseException:
            self.remove(file)
            raise

    def keep(self, file: StoredFile) -> None:
        """Publish a written file. Raises OSError."""
        card = {
            "owner": file.owner,
            "name": file.name,
            "purpose": file.purpose,
            "made": file.made,
            "lasts": file.lasts,
        }
        write_atomically(_card(file.path), msgspec.json.encode(card), self.lasting)
        with self._lock:
            self._files[file.id] = file

    def get(self, identity: Any, owner: str, param: str | None = None) -> StoredFile:
        """A file by its id. Raises ApiError(404), also for another owner's file."""
        self._refresh()
        file = self._files.get(identity) if isinstance(identity, str) else None
        if file is None or file.owner != owner:
            raise ApiError(404, f"no file {str(identity)[:64]!r}", param=param)
        return file

    def find(self, identity: str | None) -> StoredFile | None:
        """A file by its id, of any owner."""
        self._refresh()
        return self._files.get(identity) if identity is not None else None

    def list_owned(self, owner: str) -> list[StoredFile]:
        """The files of an owner, oldest first."""
        owned = [file for file in self._refresh() if file.owner == owner]
        return sorted(owned, key=lambda file: file.made)

    def remove(self, file: StoredFile) -> None:
        """Delete a file."""
        with self._lock:
            self._files.pop(file.id, None)
        _card(file.path).unlink(missing_ok=True)
        file.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Delete temporary files."""
        self._files.clear()
        if self._folder is not None and self._temporary:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _refresh(self) -> list[StoredFile]:
        """List all files, after reading changes of other servers and removing expired files."""
        with self._lock:
            self._scan()
            return list(self._files.values())

    def _scan(self) -> None:
        if self._folder is None:
            return
        cards = {entry.name for entry in os.scandir(self.folder / "files") if _is_card(entry.name)}
        for identity in self._files.keys() - {name.removesuffix(".json") for name in cards}:
            del self._files[identity]
        known = {f"{identity}.json" for identity in self._files}
        for name in cards - known:
            file = self._read(name)
            if file is not None:
                self._files[file.id] = file
        for file in [file for file in self._files.values() if file.expired]:
            self.remove(file)

    def _read(self, name: str) -> StoredFile | None:
        """Read a file's card; None if it is missing or invalid."""
        path = self.folder / "files" / name.removesuffix(".json")
        try:
            card = msgspec.json.decode(_card(path).read_bytes())
            age = max(0.0, time.time() - card["made"] / 1e9)
            return StoredFile(path.name, path=path, since=time.monotonic() - age, **card)
        except (OSError, ValueError, TypeError, KeyError):
            return None


def _card(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _is_card(name: str) -> bool:
    return name.startswith("file-") and name.endswith(".json")
