"""Stores uploaded and generated files on disk under random names, accessible only to their owner.

Each file has a card with its metadata. The card is written last and atomically, so that a file
either exists completely or was never acknowledged, also after a power loss. Several servers may
share a folder.
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
from attrs import define, field

from modulm.errors import ConfigError
from modulm_route_files.clock import Clock, Moment
from modulm_route_files.disk import (
    flush_file,
    flush_folder,
    make_folder,
    open_locked,
    remove_abandoned,
    write_atomically,
)
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
]

#: Version of the format of files and batches on disk; releases read this one and older ones.
#: 2 added to the cards of files when they were made by the clock of the machine's start.
FORMAT = 2

#: Minimum and maximum of `expires_after` in seconds: an hour and thirty days.
_SHORTEST, _LONGEST = 3_600, 2_592_000
#: OpenAI's defaults: batch files expire after thirty days, others never.
_USUAL = {"batch": _LONGEST}
_PIECE = 1 << 20
#: Nanoseconds after a change of a folder in which a further one may get the same time of change.
_SETTLED = 1_000_000_000


@define(eq=False)
class StoredFile:
    """A stored file.

    name: the client's file name, never used as a path. lasts: lifetime in seconds, None for no
    limit. moment: when it was created.
    """

    id: str
    owner: str
    name: str
    purpose: str
    path: Path
    moment: Moment
    lasts: int | None = None
    _size: int | None = field(default=None, init=False, repr=False)

    @property
    def created(self) -> int:
        """Time of creation in seconds of Unix time."""
        return self.moment.made // 1_000_000_000

    @property
    def size(self) -> int:
        """Size in bytes; 0 if the file was deleted. Only outputs of batches grow."""
        if self._size is not None:
            return self._size
        try:
            size = self.path.stat().st_size
        except OSError:
            return 0
        if self.purpose != "batch_output":
            self._size = size
        return size

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
            make_folder(folder, lasting=True)
            write_atomically(note, msgspec.json.encode({"version": FORMAT}), lasting=True)


class FileStore:
    """Files in a folder, by default a temporary one.

    max_files, max_bytes: limits of stored files, shared equally by the owners. lasting: the files
    are kept after the server ends, and flushed to the disk before they are acknowledged. owners:
    number of owners.
    """

    def __init__(
        self,
        folder: Path | None,
        max_files: int,
        max_bytes: int,
        *,
        lasting: bool,
        owners: int = 1,
        clock: Clock | None = None,
    ) -> None:
        self.lasting = lasting
        self._clock = clock or Clock()
        self._temporary = folder is None
        self._folder = folder
        self._max_files = max(1, max_files // owners)
        self._max_bytes = max(1, max_bytes // owners)
        self._files: dict[str, StoredFile] = {}
        #: When the folder was last changed before it was read; None if it may have changed since.
        self._scanned: int | None = None
        # Uploads are written in threads.
        self._lock = threading.RLock()

    @property
    def folder(self) -> Path:
        """The folder, created on first use. Raises OSError."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="modulm-files-"))
        for part in ("files", "batches"):
            make_folder(self._folder / part, self.lasting)
        return self._folder

    def make(
        self,
        owner: str,
        name: str,
        purpose: str,
        lasts: int | None = None,
        identity: str | None = None,
    ) -> StoredFile:
        """Create a file entry, to be written with `write`.

        lasts: lifetime in seconds; the default depends on the purpose. identity: its id, by default
        a random one. Raises ApiError(429) if the owner stores too many files, OSError.
        """
        stored = self.list_owned(owner)
        full = len(stored) >= self._max_files
        if full or sum(file.size for file in stored) >= self._max_bytes:
            raise ApiError(429, "too many files are stored: delete some", code="overloaded")
        identity = identity or f"file-{uuid4().hex}"
        return StoredFile(
            identity,
            owner,
            name[:255],
            purpose,
            self.folder / "files" / identity,
            self._clock.now(),
            lasts=_USUAL.get(purpose) if lasts is None else lasts,
        )

    def write(self, file: StoredFile, source: IO[bytes]) -> None:
        """Write a file and publish it; on failure, remove it. Raises OSError."""
        try:
            with open_locked(file.path) as target:
                shutil.copyfileobj(source, target, _PIECE)
                target.flush()
                if self.lasting:
                    os.fsync(target.fileno())
                self._publish(file)
        except BaseException:
            self._discard(file)
            raise

    def _publish(self, file: StoredFile) -> None:
        """Write the card of a written file. Raises OSError."""
        card = {
            "owner": file.owner,
            "name": file.name,
            "purpose": file.purpose,
            "made": file.moment.made,
            "boot": file.moment.boot,
            "uptime": file.moment.uptime,
            "lasts": file.lasts,
        }
        write_atomically(_card(file.path), msgspec.json.encode(card), self.lasting)
        with self._lock:
            self._files[file.id] = file

    def flush(self, *identities: str | None) -> None:
        """Flush what was written to files to the disk, if they are kept. Raises OSError."""
        for identity in identities if self.lasting else ():
            if identity is not None:
                with suppress(FileNotFoundError):
                    flush_file(self.folder / "files" / identity)

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
        return sorted(owned, key=lambda file: file.moment.made)

    def remove(self, file: StoredFile) -> None:
        """Delete a file. Raises OSError."""
        self._discard(file)
        if self.lasting:
            flush_folder(file.path.parent)

    def _discard(self, file: StoredFile) -> None:
        with self._lock:
            self._files.pop(file.id, None)
        # The card first: without it, the file does not exist.
        _card(file.path).unlink(missing_ok=True)
        file.path.unlink(missing_ok=True)

    def remove_leftovers(self) -> None:
        """Remove what servers left that died or lost power while they stored or removed a file.

        What another server is writing stays. Raises OSError.
        """
        folder = self.folder / "files"
        for entry in list(os.scandir(folder)):
            path = folder / entry.name
            if entry.name.endswith(".new"):
                remove_abandoned(path)
            elif _is_card(entry.name):
                remove_abandoned(path, unless=path.with_suffix(""))
            elif entry.name.startswith("file-"):
                remove_abandoned(path, unless=_card(path))

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
        folder = self.folder / "files"
        changed = folder.stat().st_mtime_ns
        if changed != self._scanned:
            self._read_folder(folder)
            self._scanned = changed if time.time_ns() > changed + _SETTLED else None
        for file in list(self._files.values()):
            if file.lasts is not None and file.moment.is_over(file.lasts, self._clock):
                self._discard(file)

    def _read_folder(self, folder: Path) -> None:
        """Read what other servers have added, and forget what they have removed."""
        cards = {entry.name for entry in os.scandir(folder) if _is_card(entry.name)}
        for identity in self._files.keys() - {name.removesuffix(".json") for name in cards}:
            del self._files[identity]
        known = {f"{identity}.json" for identity in self._files}
        for name in cards - known:
            file = self._read(name)
            if file is not None:
                self._files[file.id] = file

    def _read(self, name: str) -> StoredFile | None:
        """Read a file's card; None if it, or the file, is missing or invalid."""
        path = self.folder / "files" / name.removesuffix(".json")
        try:
            card = msgspec.json.decode(_card(path).read_bytes())
            made, boot, uptime = card.pop("made"), card.pop("boot", ""), card.pop("uptime", 0.0)
            moment = Moment(int(made), str(boot), float(uptime))
            if not path.exists():  # an interrupted removal
                return None
            return StoredFile(path.name, path=path, moment=moment, **card)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


def _card(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _is_card(name: str) -> bool:
    return name.startswith("file-") and name.endswith(".json")
