"""The files: where a block is, what is in its file, and which files go when there are too many.

`folder/MODEL/RofN/XX/NAME.kv`: the model's digest, rank and ranks, the block's name in hex. A file
is a header of one line of JSON and the bytes of the block.
"""

from __future__ import annotations

import contextlib
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
    "BadFile",
    "Stored",
    "block_path",
    "clear",
    "evict",
    "models",
    "read",
    "scan",
    "write",
]

#: Where files are if nobody says otherwise.
FOLDER = "~/.cache/modulm/kv"
VERSION = 1
#: Longest header, in bytes.
_HEADER = 4096
#: Seconds after which a temporary file belongs to a process that is gone.
_STALE = 600
#: How the folder of a model is called.
_DIGEST = re.compile("[0-9a-f]{32}")


class BadFile(Exception):
    """A file is torn, or another's; the text says how."""


@frozen
class Stored:
    """A file of a block. model: its digest; size: bytes; used: seconds since the epoch."""

    path: Path
    model: str
    size: int
    used: float


def block_path(folder: Path, model: str, rank: int, ranks: int, name: bytes) -> Path:
    """Where a rank's part of a block is."""
    text = name.hex()
    return folder / model / f"{rank}of{ranks}" / text[:2] / f"{text}.kv"


def _checksum(payload: memoryview) -> str:
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


def write(path: Path, described: Mapping[str, Any], payload: memoryview) -> int:
    """Write a file whole or not at all; how many bytes it has. Raises OSError."""
    header = {"modulm": "kv", "version": VERSION, "bytes": len(payload), **described}
    line = json.dumps({**header, "checksum": _checksum(payload)}).encode() + b"\n"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        with temporary.open("xb") as file:
            file.write(line)
            file.write(payload)
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
        wanted = {"modulm": "kv", "version": VERSION, "bytes": len(into), **described}
        for key, value in wanted.items():
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


def _header(line: bytes) -> Mapping[str, Any]:
    with contextlib.suppress(ValueError):
        header = json.loads(line)
        if isinstance(header, dict):
            return header
    return {}


def models(folder: Path) -> list[str]:
    """The digests of the models that have files in the folder."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(path.name for path in paths if _DIGEST.fullmatch(path.name) and path.is_dir())


def scan(folder: Path, model: str | None = None) -> Iterator[Stored]:
    """The files of a model, or of all. Removes temporary files that nobody writes."""
    for name in models(folder) if model is None else [model]:
        for path in (folder / name).glob("*of*/*/*.kv*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if not path.name.startswith("."):
                    yield Stored(path, name, status.st_size, status.st_mtime)
                elif status.st_mtime < time.time() - _STALE:
                    path.unlink()


def evict(folder: Path, most: int) -> int:
    """Remove the files that were used the longest ago until at most `most` bytes are left, which
    it returns. Engines that share the folder may do so at the same time.
    """
    files = sorted(scan(folder), key=lambda file: file.used)
    total = sum(file.size for file in files)
    for file in files:
        if total <= most:
            break
        file.path.unlink(missing_ok=True)
        total -= file.size
    return total


def clear(folder: Path, model: str | None = None) -> int:
    """Remove the files of one model, or of all; how many bytes they had. Raises ValueError for a
    name that is no digest of a model.
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
