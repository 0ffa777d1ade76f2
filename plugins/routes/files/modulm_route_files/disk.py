"""File operations that survive a power loss, and the removal of what interrupted ones left."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING
from uuid import uuid4

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "flush_file",
    "flush_folder",
    "is_at",
    "make_folder",
    "open_locked",
    "remove_abandoned",
    "write_atomically",
]

#: What file systems answer that cannot flush a folder, or do so by themselves.
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP)


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk. Raises OSError."""
    _flush(folder, os.O_RDONLY | os.O_DIRECTORY)


def flush_file(path: Path) -> None:
    """Flush what anybody has written to a file to the disk. Raises OSError."""
    _flush(path, os.O_RDONLY)


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path, lasting: bool, mode: int = 0o700) -> None:
    """Create a folder and those above it. lasting: flush their names to the disk.

    mode: of the folder itself; those above it get the usual one. Raises OSError.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent, lasting, 0o777)
    folder.mkdir(mode, exist_ok=True)
    if lasting:
        flush_folder(folder.parent)


@contextmanager
def open_locked(path: Path) -> Iterator[IO[bytes]]:
    """Create a file, under a lock by which `remove_abandoned` tells that somebody writes it.

    On file systems without locks it is created without, and never counts as abandoned.
    """
    with path.open("wb") as target:
        with suppress(OSError):
            fcntl.flock(target, fcntl.LOCK_EX)
        if not is_at(target.fileno(), path):  # removed before it was locked
            with open_locked(path) as second:
                yield second
            return
        yield target


def is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at its path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def remove_abandoned(path: Path, unless: Path | None = None) -> None:
    """Remove a file that nobody has locked. unless: keep it if this other one exists."""
    with suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_at(file.fileno(), path) and not (unless is not None and unless.exists()):
            path.unlink()


def write_atomically(path: Path, content: bytes, lasting: bool) -> None:
    """Write or replace a file atomically. lasting: flush it, and its name, to the disk.

    Raises OSError; the earlier file may then have been replaced, but only as a whole.
    """
    fresh = path.with_name(f"{path.name}.{uuid4().hex}.new")
    try:
        with open_locked(fresh) as target:
            target.write(content)
            target.flush()
            if lasting:
                os.fsync(target.fileno())
            fresh.replace(path)
        if lasting:
            flush_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
