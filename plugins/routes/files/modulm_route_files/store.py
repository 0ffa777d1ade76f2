"""Uploaded and produced files: on disk under random names, and only for their owner.

A file is two: what is in it, and a card that says whose it is. The card is written last, whole and
at once, so that a file either is there or was never acknowledged; several servers may use one
folder, and one that starts finds what others have left.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
from attrs import define

from modulm_server.errors import ApiError
from modulm_server.json_body import bad_field

if TYPE_CHECKING:
    from collections.abc import Mapping

    from modulm_route_files.objects import FileCard

__all__ = ["FileStore", "StoredFile", "expires_after", "no_room", "write_whole"]

#: Seconds that a file may be kept for, where that is said: an hour to thirty days.
_SHORTEST, _LONGEST = 3_600, 2_592_000
#: OpenAI's: files for batches go after thirty days, all others stay.
_USUAL = {"batch": _LONGEST}
_PIECE = 1 << 20


@define(eq=False)
class StoredFile:
    """A file. `name` is the client's, and is never used as a path. `lasts`: seconds after which it
    is gone, None: never; `made`: when, in ns of Unix time; `since`: the same on a clock that never
    jumps, in s.
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
        """When it was made, in s of Unix time."""
        return self.made // 1_000_000_000

    @property
    def expired(self) -> bool:
        """Whether its time is over."""
        return self.lasts is not None and time.monotonic() >= self.since + self.lasts

    @property
    def size(self) -> int:
        """Bytes; 0 for one that is gone."""
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


def expires_after(given: Mapping[str, Any] | None, where: str) -> int | None:
    """The seconds of OpenAI's `expires_after`, in the field `where`. Raises ApiError(400)."""
    if given is None:
        return None
    seconds = given.get("seconds")
    if given.get("anchor") != "created_at":
        raise bad_field(where, f"{where}.anchor: must be created_at")
    if not isinstance(seconds, int) or not _SHORTEST <= seconds <= _LONGEST:
        raise bad_field(where, f"{where}.seconds: a number from {_SHORTEST} to {_LONGEST}")
    return seconds


def no_room(error: OSError) -> ApiError:
    """What a client is told when something cannot be stored."""
    reason = error.strerror or "the disk cannot be used"
    return ApiError(507, f"this cannot be stored: {reason}", code="insufficient_storage")


def write_whole(path: Path, content: bytes, lasting: bool) -> None:
    """Write a file at once, in place of an old one. `lasting`: it survives a loss of power."""
    fresh = path.with_name(f"{path.name}.{uuid4().hex}.new")
    try:
        with fresh.open("wb") as target:
            target.write(content)
            _settle(target, lasting)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def _settle(target: IO[bytes], lasting: bool) -> None:
    target.flush()
    if lasting:
        os.fsync(target.fileno())


class FileStore:
    """Files in a folder; without one it makes a folder of its own.

    most, most_bytes: that are stored. lasting: the files outlive this server.
    """

    def __init__(self, folder: Path | None, most: int, most_bytes: int, *, lasting: bool) -> None:
        self.lasting = lasting
        self._own = folder is None
        self._folder = folder
        self._most = most
        self._most_bytes = most_bytes
        self._files: dict[str, StoredFile] = {}
        # Uploads are written on threads of their own.
        self._lock = threading.RLock()

    @property
    def folder(self) -> Path:
        """Where everything is, made when it is needed. Raises OSError."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="modulm-files-"))
        for part in ("files", "batches"):
            (self._folder / part).mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._folder

    def make(self, owner: str, name: str, purpose: str, lasts: int | None = None) -> StoredFile:
        """A file to be written to its path and then kept (`keep`), for `lasts` seconds or as long
        as its purpose says. Raises ApiError(429) when there are too many, OSError.
        """
        there = self._look()
        used = sum(file.size for file in there)
        if len(there) >= self._most or used >= self._most_bytes:
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
        """Fill a file and keep it, or leave nothing of it. Raises OSError."""
        try:
            with file.path.open("wb") as target:
                shutil.copyfileobj(source, target, _PIECE)
                _settle(target, self.lasting)
            self.keep(file)
        except BaseException:
            self.remove(file)
            raise

    def keep(self, file: StoredFile) -> None:
        """From now on it is there. Raises OSError."""
        card = {
            "owner": file.owner,
            "name": file.name,
            "purpose": file.purpose,
            "made": file.made,
            "lasts": file.lasts,
        }
        write_whole(_card(file.path), msgspec.json.encode(card), self.lasting)
        with self._lock:
            self._files[file.id] = file

    def get(self, identity: Any, owner: str, param: str | None = None) -> StoredFile:
        """A file by its whole id. Raises ApiError(404), also for somebody else's."""
        self._look()
        file = self._files.get(identity) if isinstance(identity, str) else None
        if file is None or file.owner != owner:
            raise ApiError(404, f"there is no file {str(identity)[:64]!r}", param=param)
        return file

    def find(self, identity: str | None) -> StoredFile | None:
        """A file, whoever owns it."""
        self._look()
        return self._files.get(identity) if identity is not None else None

    def of(self, owner: str) -> list[StoredFile]:
        """Everything that somebody owns, the oldest first."""
        found = [file for file in self._look() if file.owner == owner]
        return sorted(found, key=lambda file: file.made)

    def remove(self, file: StoredFile) -> None:
        """Delete a file."""
        with self._lock:
            self._files.pop(file.id, None)
        _card(file.path).unlink(missing_ok=True)
        file.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Delete everything that is not meant to last."""
        self._files.clear()
        if self._folder is not None and self._own:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _look(self) -> list[StoredFile]:
        """What there is. Learns of files that others have made or deleted, and lets those go whose
        time is over.
        """
        with self._lock:
            self._learn()
            return list(self._files.values())

    def _learn(self) -> None:
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
        """A file by its card; None if that is gone or none of ours."""
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
