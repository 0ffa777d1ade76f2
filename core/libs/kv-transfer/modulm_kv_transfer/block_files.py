"""Files of blocks: their paths, format, and eviction.

Paths are `folder/MODEL/RofN/XX/NAME.kv`: the model's digest, rank and number of ranks, and the
block's name in hex. A file is a one-line JSON header followed by the block's bytes. The time of its
last change is when it was used, or, of a block that is held, until when it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

__all__ = [
    "FOLDER",
    "OVERHEAD",
    "BadFile",
    "Stored",
    "block_path",
    "clear",
    "describe",
    "evict",
    "hold",
    "models",
    "read",
    "release",
    "scan",
    "touch",
    "write",
]

#: Default folder.
FOLDER = "~/.cache/modulm/kv"
VERSION = 2
#: Maximum seconds that a file is held: a day, and an hour for clocks that differ.
_LONGEST_HOLD = 90_000
#: Maximum size of a header in bytes.
_HEADER = 4096
#: About how many bytes a file has beside its block.
OVERHEAD = 400
#: Pattern of a model's folder name.
_DIGEST = re.compile("[0-9a-f]{32}")


class BadFile(Exception):
    """A file is damaged or belongs to another block."""


@frozen
class Stored:
    """A file of a block. model: its digest; size: bytes; used: seconds since the epoch."""

    path: Path
    model: str
    size: int
    used: float


def block_path(folder: Path, model: str, rank: int, ranks: int, name: bytes) -> Path:
    """Return the path of a rank's part of a block."""
    text = name.hex()
    return folder / model / f"{rank}of{ranks}" / text[:2] / f"{text}.kv"


#: Numbers of 8 bytes that are hashed side by side, and what each is multiplied by (odd).
_LANES, _FACTOR = 4096, 0x9E3779B97F4A7C15


def _checksum(payload: memoryview) -> str:
    """Return a checksum against accidents, not attacks, at a third of the speed of a copy.

    Each lane is a polynomial modulo 2**64 over every 4096th number, so that any change of a single
    one, and exchanged pieces, give another result. Cryptographic hashes take ten times as long.
    """
    import numpy as np  # not needed by `modulm --help`, which imports this module

    whole = len(payload) // (8 * _LANES) * (8 * _LANES)
    lanes, factor = np.zeros(_LANES, dtype=np.uint64), np.uint64(_FACTOR)
    for row in np.frombuffer(payload[:whole], dtype="<u8").reshape(-1, _LANES):
        np.multiply(lanes, factor, out=lanes)
        np.add(lanes, row, out=lanes)
    digest = hashlib.blake2b(lanes.tobytes(), digest_size=16)
    digest.update(payload[whole:])
    return digest.hexdigest()


def write(path: Path, described: Mapping[str, Any], payload: memoryview) -> int:
    """Write a file atomically; return its size in bytes. Raises OSError."""
    header = {"modulm": "kv", "version": VERSION, "bytes": len(payload), **described}
    line = json.dumps({**header, "checksum": _checksum(payload)}).encode() + b"\n"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
        try:
            with temporary.open("xb") as file:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                if not temporary.exists():  # `scan` came between its creation and its lock
                    continue
                file.write(line)
                file.write(payload)
                file.flush()
                temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return len(line) + len(payload)


def read(path: Path, described: Mapping[str, Any], into: memoryview) -> None:
    """Fill `into` with the bytes of a block. Raises BadFile, OSError."""
    with path.open("rb", buffering=0) as file:
        head = file.read(_HEADER)
        line, end, _ = head.partition(b"\n")
        header = _header(line if end else b"")
        expected = {"modulm": "kv", "version": VERSION, "bytes": len(into), **described}
        for key, value in expected.items():
            if header.get(key) != value:
                raise BadFile(f"{path.name}: {key} is {header.get(key)!r}, not {value!r}")
        file.seek(len(line) + 1)
        count = 0
        while count < len(into) and (more := file.readinto(into[count:])):
            count += more
    if count < len(into):
        raise BadFile(f"{path.name}: {count} of {len(into)} bytes")
    if _checksum(into) != header.get("checksum"):
        raise BadFile(f"{path.name}: the checksum is wrong")


def describe(path: Path) -> tuple[Mapping[str, Any], int]:
    """Return a file's header, and the size of its block in bytes. Raises BadFile, OSError."""
    with path.open("rb", buffering=0) as file:
        line, end, _ = file.read(_HEADER).partition(b"\n")
        size = os.fstat(file.fileno()).st_size - len(line) - 1
    header = _header(line if end else b"")
    if not header or header.get("bytes") != size:
        raise BadFile(f"{path.name}: {header.get('bytes')} bytes are expected, {size} are there")
    return header, size


def _header(line: bytes) -> Mapping[str, Any]:
    with contextlib.suppress(ValueError):
        header = json.loads(line)
        if isinstance(header, dict):
            return header
    return {}


def models(folder: Path) -> list[str]:
    """Return the digests of models with files in the folder."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(path.name for path in paths if _DIGEST.fullmatch(path.name) and path.is_dir())


def scan(folder: Path, model: str | None = None) -> Iterator[Stored]:
    """Return the files of one model, or of all. Removes temporary files that nobody writes."""
    for name in models(folder) if model is None else [model]:
        for path in (folder / name).glob("*of*/*/*.kv*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if not path.name.startswith("."):
                    yield Stored(path, name, status.st_size, status.st_mtime)
                else:
                    _remove_unlocked(path)


def touch(path: Path) -> None:
    """Note that a file is used now; one that is held stays so. Raises OSError."""
    now = time.time()
    if not now < path.stat().st_mtime <= now + _LONGEST_HOLD:
        os.utime(path, (now, now))


def hold(path: Path, seconds: float) -> None:
    """Let other files be evicted first until at least so many seconds from now. Raises OSError."""
    now = time.time()
    if not now + seconds < path.stat().st_mtime <= now + _LONGEST_HOLD:
        os.utime(path, (now, now + seconds))


def release(path: Path) -> None:
    """End a hold, as if the file was used now. Raises OSError."""
    now = time.time()
    if path.stat().st_mtime > now:
        os.utime(path, (now, now))


def _remove_unlocked(path: Path) -> None:
    """Remove a temporary file whose writer died. Raises OSError, also if it is being written.

    Its lock tells, not its age: a jump of the clock makes files look old.
    """
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def evict(folder: Path, most: int) -> int:
    """Remove least recently used files until at most `most` bytes are left; return the size.

    Held files are the last, those that are held longest at the end. Engines that share the folder
    may call this concurrently.
    """
    latest = time.time() + _LONGEST_HOLD
    # A time that no hold reaches is from before a jump of the clock.
    files = sorted(scan(folder), key=lambda file: file.used if file.used <= latest else 0.0)
    total = sum(file.size for file in files)
    for file in files:
        if total <= most:
            break
        file.path.unlink(missing_ok=True)
        total -= file.size
    return total


def clear(folder: Path, model: str | None = None) -> int:
    """Remove the files of one model, or of all; return their total size in bytes.

    Raises ValueError for an invalid digest.
    """
    if model is not None and not _DIGEST.fullmatch(model):
        raise ValueError(f"{model!r} is not the digest of a model")
    total = 0
    for file in list(scan(folder, model)):
        file.path.unlink(missing_ok=True)
        total += file.size
        with contextlib.suppress(OSError):  # others are left in it
            for parent in list(file.path.parents)[:3]:
                parent.rmdir()
    return total
