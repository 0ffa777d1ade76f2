"""A cache of checkpoints from stores that have files with versions, but no client of their own.

Under the cache's folder, each remote folder has one of its own, with

- `blobs/DIGEST`: contents, named by file, size and version; `DIGEST.part` until they are whole,
- `snapshots/ID/`: links to them under the files' names, with `ID` derived from the whole listing,
- `latest`: what the last download returned, below `snapshots`, for use without a connection.

Files that did not change are not downloaded again; what was interrupted goes on where it ended.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen
from filelock import FileLock
from tqdm import tqdm

from modulm.errors import CheckpointError
from modulm_downloads.headers import SUFFIX, write_header

if TYPE_CHECKING:
    from modulm.contracts.checkpoint import WantedFiles
    from modulm.contracts.config import EngineConfig

__all__ = ["RemoteFile", "RemoteFolder", "Unreachable", "fetch_snapshot"]

log = logging.getLogger("modulm")

#: Bytes of one read, and how many reads are in flight: 128 MiB are in memory at most.
_PIECE, _READS = 16 << 20, 8
#: Largest header of a safetensors file, in bytes, as in the format's own library.
_LARGEST_HEADER = 100_000_000


class Unreachable(CheckpointError):
    """Raised by a `RemoteFolder` without a connection: a complete snapshot may be used instead."""


@frozen
class RemoteFile:
    """A file of a remote folder.

    name: path below the folder, with slashes. version: changes with the contents (an ETag, a
    checksum, a time). digest: algorithm of `hashlib` and hexadecimal checksum of the contents, if
    the store has one.
    """

    name: str
    size: int
    version: str
    digest: tuple[str, str] | None = None

    @property
    def blob(self) -> str:
        """Name of its contents in the cache."""
        stated = json.dumps([self.name, self.size, self.version])
        return hashlib.sha256(stated.encode()).hexdigest()[:40]


class RemoteFolder(ABC):
    """A folder of files elsewhere. Methods raise CheckpointError with advice, and Unreachable."""

    #: What the user wrote.
    name: str
    #: Name of its folder in the cache.
    key: str
    #: Whether `files` found that the name is one of a file.
    is_file = False

    @abstractmethod
    def files(self) -> Sequence[RemoteFile]:
        """List all files below the folder."""

    @abstractmethod
    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        """Return the bytes from `start` to before `end`. Called by several threads."""

    def is_damaged(self, file: RemoteFile, digest: str) -> bool:
        """Whether contents whose checksum is `digest`, not the expected one, are to be rejected."""
        return True


def fetch_snapshot(
    remote: RemoteFolder,
    config: EngineConfig,
    files: WantedFiles,
    part: tuple[str, str] | None = None,
) -> Path:
    """Return a local folder with the wanted files of a remote folder; downloads what is missing.

    If the remote folder is a single file, returns that file's path. part: repository and part of
    `repository:PART`; returns the part's first file. Raises CheckpointError.
    """
    cache = _cache_folder(config) / remote.key
    try:
        listed = [file for file in remote.files() if _is_inside(file.name)]
    except Unreachable as error:
        return _latest(remote, cache, error)
    if not listed:
        raise CheckpointError(f"{remote.name}: no such folder, or it has no files")
    wanted = _choose(remote, listed, config, files)
    if part is not None:
        by_name = {file.name: file for file in listed}
        wanted = [by_name[name] for name in files.choose(*part, sorted(by_name))]
    if files.headers_in is not None and any(f.name.endswith(SUFFIX) for f in wanted):
        _write_headers(remote, wanted, files.headers_in)
        return files.headers_in
    stated = "\n".join(sorted(file.blob for file in listed))
    snapshot = cache / "snapshots" / hashlib.sha256(stated.encode()).hexdigest()[:40]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / "lock"):
            missing = [file for file in wanted if not (cache / "blobs" / file.blob).exists()]
            _download(remote, missing, cache / "blobs", shown=config.load.use_tqdm_on_load)
            for file in wanted:
                _link(cache / "blobs" / file.blob, snapshot / file.name)
            is_file = remote.is_file or part is not None
            path = snapshot / wanted[0].name if is_file else snapshot
            (cache / "latest").write_text(path.relative_to(cache / "snapshots").as_posix())
    except OSError as error:
        raise CheckpointError(f"{remote.name}: cannot be stored in {cache}: {error}") from error
    return path


def _cache_folder(config: EngineConfig) -> Path:
    """Return the folder of `--download-dir`, or one beside the Hugging Face cache."""
    from huggingface_hub import constants

    if config.load.download_dir is not None:
        return Path(config.load.download_dir).expanduser() / "modulm"
    return Path(constants.HF_HUB_CACHE).parent / "modulm"


def _is_inside(name: str) -> bool:
    """Whether a name stays below its folder."""
    parts = name.split("/")
    return not name.startswith("/") and not {"", ".", ".."} & set(parts) and "\0" not in name


def _choose(
    remote: RemoteFolder, listed: Sequence[RemoteFile], config: EngineConfig, files: WantedFiles
) -> list[RemoteFile]:
    """Return the files that match the patterns; a file that was named is taken as it is."""
    from huggingface_hub.utils import filter_repo_objects

    def matching(patterns: Iterable[str]) -> set[str]:
        return set(
            filter_repo_objects(
                (file.name for file in listed),
                allow_patterns=list(patterns),
                ignore_patterns=list(config.load.ignore_patterns),
            )
        )

    if remote.is_file:
        return list(listed)
    names = matching(files.patterns)
    if files.fallback and all("/" in name for name in matching(files.weights)):
        names |= matching(files.fallback)
    return [file for file in listed if file.name in names]


def _latest(remote: RemoteFolder, cache: Path, error: Unreachable) -> Path:
    """Return the last complete snapshot. Raises `error` if there is none."""
    try:
        path = cache / "snapshots" / (cache / "latest").read_text()
    except OSError:
        raise error from None
    if not path.exists():
        raise error
    log.warning("%s; using the files downloaded before", error)
    return path


def _download(
    remote: RemoteFolder, files: Sequence[RemoteFile], blobs: Path, *, shown: bool
) -> None:
    """Download files one after another, each in pieces that several threads read ahead."""
    blobs.mkdir(exist_ok=True)
    starts = {file.blob: _stored(blobs / f"{file.blob}.part", file) for file in files}
    total = sum(file.size for file in files)
    bar = tqdm(
        desc=remote.name, total=total, initial=sum(starts.values()), unit="B", unit_scale=True,
        disable=None if shown else True,
    )  # fmt: skip
    with bar, ThreadPoolExecutor(_READS) as pool:
        pieces = _read_ahead(remote, files, starts, pool)
        for file in files:
            part = blobs / f"{file.blob}.part"
            with part.open("ab") as target:
                while target.tell() < file.size:
                    data = next(pieces)
                    target.write(data)
                    bar.update(len(data))
            _check(remote, file, part)
            part.replace(blobs / file.blob)


def _stored(part: Path, file: RemoteFile) -> int:
    """Return how many bytes of a file are there; starts again if there are too many."""
    size = part.stat().st_size if part.exists() else 0
    if size > file.size:
        part.unlink()
        size = 0
    return size


def _read_ahead(
    remote: RemoteFolder,
    files: Sequence[RemoteFile],
    starts: Mapping[str, int],
    pool: ThreadPoolExecutor,
) -> Iterator[bytes]:
    """Yield the rest of each file in pieces, in order; `_READS` of them are read at a time."""
    pieces = (
        (file, start, min(start + _PIECE, file.size))
        for file in files
        for start in range(starts[file.blob], file.size, _PIECE)
    )
    running = deque((pool.submit(remote.read, *piece), piece) for piece in islice(pieces, _READS))
    try:
        while running:
            future, (file, start, end) = running.popleft()
            data = future.result()
            if len(data) != end - start:
                raise CheckpointError(
                    f"{remote.name}: {file.name}: {len(data)} bytes at {start} instead of "
                    f"{end - start}: it changed while it was read; try again"
                )
            if (piece := next(pieces, None)) is not None:
                running.append((pool.submit(remote.read, *piece), piece))
            yield data
    finally:
        for future, _ in running:
            future.cancel()


def _check(remote: RemoteFolder, file: RemoteFile, part: Path) -> None:
    """Compare the contents with the store's checksum. Raises CheckpointError; removes the part."""
    if file.digest is None:
        return
    algorithm, expected = file.digest
    with part.open("rb") as source:
        found = hashlib.file_digest(source, algorithm).hexdigest()
    if found != expected and remote.is_damaged(file, found):
        part.unlink()
        raise CheckpointError(
            f"{remote.name}: {file.name}: {algorithm} {found} instead of {expected}: the download "
            "is damaged, or the file changed while it was read; try again"
        )


def _link(blob: Path, link: Path) -> None:
    """Create a relative link to a blob, or a copy of it where the file system has no links."""
    if link.exists():
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    try:
        link.symlink_to(os.path.relpath(blob, link.parent))
    except OSError:
        os.link(blob, link)


def _write_headers(remote: RemoteFolder, files: Sequence[RemoteFile], folder: Path) -> None:
    """Write the files into a folder, safetensors files without their data."""
    for file in files:
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not file.name.endswith(SUFFIX):
            path.write_bytes(remote.read(file, 0, file.size))
            continue
        length = int.from_bytes(remote.read(file, 0, min(8, file.size)), "little")
        if not 2 <= length <= min(file.size - 8, _LARGEST_HEADER):
            raise CheckpointError(f"{remote.name}: {file.name}: not a safetensors file")
        write_header(path, json.loads(remote.read(file, 8, 8 + length)))
