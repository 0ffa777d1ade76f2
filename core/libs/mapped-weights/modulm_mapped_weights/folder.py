"""The folder of packed weights: one file per key, bounded in size, shared by processes."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modulm.errors import ConfigError
from modulm_mapped_weights.file import FileReader, FileWriter, InvalidFile

__all__ = ["CacheFolder"]

log = logging.getLogger("modulm.weights")

_ENDING, _PART, _LOCK = ".weights", ".part", ".lock"
_GIB = 2**30


class CacheFolder:
    """Files are read by all processes and written under a lock per key, whole or not at all."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit = path, limit

    def read(self, key: str) -> FileReader | None:
        """Return the file of a key; None if there is none that can be used."""
        path = self.path / f"{key}{_ENDING}"
        try:
            reader = FileReader(path)
            if reader.description.get("key") != key:
                raise InvalidFile("belongs to other weights")
        except FileNotFoundError:
            return None
        except (InvalidFile, AttributeError) as error:
            log.warning("%s is ignored: it %s", path, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return reader

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Keep other processes from writing the same file; waits for one that does.

        Raises ConfigError if the folder cannot be written.
        """
        path = self.path / f"{key}{_LOCK}"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            if not _try_lock(file):
                log.info("waiting for another process that packs the same weights")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            try:
                fcntl.flock(file, fcntl.LOCK_UN)  # forks of this process have the file too
            finally:
                os.close(file)

    @contextmanager
    def write(self, key: str) -> Iterator[FileWriter]:
        """Write the file of a key, under its lock; leaves nothing if the body fails.

        Raises ConfigError if the disk is full or the file would exceed the limit.
        """
        part, path = self.path / f"{key}{_PART}", self.path / f"{key}{_ENDING}"
        try:
            self._make_space(key, 0)
            writer = FileWriter(part, self.limit)
            try:
                yield writer
                os.replace(part, path)
                _flush(self.path)
            finally:
                writer.close()
                part.unlink(missing_ok=True)
        except OverflowError as error:
            raise ConfigError(
                "weights_cache_size",
                f"{self.limit / _GIB:g} GiB are less than the packed weights of this model",
            ) from error
        except OSError as error:
            raise self._unwritable(error) from error
        self._make_space(key, path.stat().st_size)

    def _unwritable(self, error: OSError) -> ConfigError:
        reason = error.strerror or str(error)
        return ConfigError(
            "weights_cache_dir",
            f"{self.path} cannot be written: {reason}; name another folder, or use "
            "--weights-memory private",
        )

    def _make_space(self, key: str, own: int) -> None:
        """Delete abandoned parts, and the files that were not used for longest."""
        for part in self.path.glob(f"*{_PART}"):
            if part.stem != key:
                self._delete(part)
        others = []
        for path in self.path.glob(f"*{_ENDING}"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if path.stem != key:
                    others.append((status.st_mtime_ns, status.st_size, path))
        total = own + sum(size for _, size, _ in others)
        for _, size, path in sorted(others):
            if total <= self.limit:
                return
            log.info("deleting %s: --weights-cache-size is reached", path)
            self._delete(path)
            total -= size

    def _delete(self, path: Path) -> None:
        """Delete a file unless its lock is held. Processes that have mapped it keep it."""
        lock = path.with_suffix(_LOCK)
        with contextlib.suppress(OSError):
            file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                if _try_lock(file):
                    path.unlink(missing_ok=True)
            finally:
                os.close(file)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _flush(folder: Path) -> None:
    """Write the names in a folder to the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
