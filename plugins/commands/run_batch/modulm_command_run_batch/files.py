"""Batch files: reads input from a path or URL, and stores answers so that a killed run can resume.

Answers are appended to `OUTPUT.partial` with their line numbers. A second run on the same input
skips lines that have an answer. At the end, the answers are sorted into a new file, which is
renamed to the output.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

import click
import httpx

from modulm_command_run_batch.batch import Line

__all__ = ["Answers", "check_files", "is_url", "open_lines_of", "upload"]

_TIMEOUT = httpx.Timeout(60.0)
_OK = httpx.codes.OK


def is_url(name: str) -> bool:
    """Whether a name is an HTTP URL."""
    return name.startswith(("http://", "https://"))


def check_files(source: str, output: str, directory: str | None) -> None:
    """Raise click.ClickException if the output would overwrite the input, under any name, or is not
    a file. Opens nothing.
    """
    for path in _written(_target(output, directory)):
        if path.exists() and not path.is_file():
            raise click.ClickException(f"{path} is not a file that can be overwritten")
        both = not is_url(source) and path.exists() and Path(source).exists()
        if both and path.samefile(source):
            raise click.ClickException(f"{path} is the input and would be overwritten")


def open_lines_of(name: str) -> list[bytes]:
    """Read the non-blank lines of a batch file. Raises click.ClickException."""
    try:
        data = _download(name) if is_url(name) else Path(name).read_bytes()
    except OSError as error:
        raise click.ClickException(f"cannot read {name}: {error.strerror}") from error
    except httpx.HTTPError as error:
        raise click.ClickException(f"cannot fetch {name}: {error}") from error
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return [line for line in lines if line.strip()]


def _target(output: str, directory: str | None) -> Path:
    """The local file for answers: the output with links resolved, or a temporary one for a URL."""
    if is_url(output):
        name = f"modulm-batch-{_digest([output.encode()])[:16]}.jsonl"
        return Path(directory or tempfile.gettempdir(), name)
    return Path(output).resolve()


def _written(path: Path) -> tuple[Path, Path, Path]:
    """The output file, and the partial files beside it."""
    return path, path.with_name(path.name + ".partial"), path.with_name(path.name + ".ready")


def _download(url: str) -> bytes:
    answer = httpx.get(url, timeout=_TIMEOUT, follow_redirects=True)
    answer.raise_for_status()
    return answer.content


def upload(path: Path, url: str) -> None:
    """PUT a file to a URL. Raises click.ClickException naming the local file."""
    try:
        with path.open("rb") as file:
            httpx.put(url, content=_blocks(file), timeout=_TIMEOUT).raise_for_status()
    except httpx.HTTPError as error:
        raise click.ClickException(f"cannot send {url}: {error}; answers are in {path}") from error


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(1 << 20):
        yield block


class Answers:
    """The answers of one batch, on disk. Use as a context manager.

    resume: False starts over; True raises if the partial file belongs to another input.
    """

    def __init__(
        self,
        output: str,
        lines: Sequence[bytes],
        directory: str | None = None,
        resume: bool | None = None,
    ) -> None:
        self.path, self._partial, self._ready = _written(_target(output, directory))
        self._head = json.dumps({"input": _digest(lines)}) + "\n"
        self._wanted = resume
        #: Line of the input -> offset and length of its answer in the partial file.
        self._records: dict[int, tuple[int, int]] = {}
        self._file: IO[bytes]

    @property
    def done(self) -> frozenset[int]:
        """Lines of the input that have an answer."""
        return frozenset(self._records)

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._partial.open("a+b")
            self._lock()
            end = 0 if self._wanted is False else self._resume()
            self._file.truncate(end)
            self._file.seek(0, os.SEEK_END)
            if not end:
                self._file.write(self._head.encode())
        except OSError as error:
            raise click.ClickException(f"cannot write {self.path}: {error.strerror}") from error
        return self

    def _lock(self) -> None:
        """Lock the output against other runs."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise click.ClickException(f"another run is writing {self.path}") from error

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # write errors were reported already
            self._file.close()

    def take_finished(self, lines: Sequence[Line]) -> None:
        """Take over successful answers from an existing output."""
        if not self.path.exists():
            return
        indices = {line.custom_id: index for index, line in enumerate(lines) if not line.problem}
        with self.path.open("rb") as file:
            for raw in file:
                try:
                    row = json.loads(raw)
                    well = row["error"] is None and row["response"]["status_code"] == _OK
                    index = indices.get(row["custom_id"])
                except (ValueError, TypeError, KeyError):
                    continue
                if well and index is not None and index not in self._records:
                    self.add(index, row)

    def add(self, line: int, answer: dict[str, Any]) -> None:
        """Append the answer of one line."""
        row = json.dumps({"line": line, "answer": answer}, ensure_ascii=False).encode() + b"\n"
        self._records[line] = (self._file.tell(), len(row))
        self._file.write(row)
        self._file.flush()

    def finish(self) -> tuple[Path, int]:
        """Write the output in input order and delete the partial file; returns the failures."""
        failed = 0
        with self._ready.open("w", encoding="utf-8") as output:
            for line in sorted(self._records):
                offset, length = self._records[line]
                self._file.seek(offset)
                row = json.loads(self._file.read(length))["answer"]
                failed += row.get("error") is not None
                output.write(json.dumps(row, ensure_ascii=False) + "\n")
            output.flush()
            os.fsync(output.fileno())
        self._ready.replace(self.path)
        self._partial.unlink()
        self._file.close()
        return self.path, failed

    def _resume(self) -> int:
        """Find answers of an earlier run; returns the end of the last complete one, or 0."""
        file = self._file
        file.seek(0)
        head = file.readline()
        if head != self._head.encode():
            if head and self._wanted:
                raise click.ClickException(f"{self._partial} is of another input")
            if head:
                click.echo(f"{self._partial} belongs to another input: starting over", err=True)
            return 0
        end = file.tell()
        for row in file:
            number = _line_of(row)
            if number is None:
                break
            self._records[number] = (end, len(row))
            end += len(row)
        return end


def _line_of(row: bytes) -> int | None:
    """The line of an answer; None for an incomplete row."""
    if not row.endswith(b"\n"):
        return None
    try:
        return int(json.loads(row)["line"])
    except (ValueError, KeyError, TypeError):
        return None


def _digest(lines: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line + b"\n")
    return digest.hexdigest()
