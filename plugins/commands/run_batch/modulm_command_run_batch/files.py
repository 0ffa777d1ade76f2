"""Batch files: reading them from a path or URL, and answers that survive a kill.

Answers are appended to `OUTPUT.partial` as they come, each with the number of its line. A second
run on the same input skips the lines that are there. At the end they are put into the input's
order under the final name.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

import click
import httpx

__all__ = ["Answers", "is_url", "read_lines", "upload"]

_TIMEOUT = httpx.Timeout(60.0)


def is_url(name: str) -> bool:
    """Whether a file is behind HTTP."""
    return name.startswith(("http://", "https://"))


def read_lines(name: str) -> list[str]:
    """The lines of a batch file that are not blank. Raises click.ClickException."""
    try:
        text = _download(name) if is_url(name) else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise click.ClickException(f"{name} is not UTF-8 text: {error}") from error
    except httpx.HTTPError as error:
        raise click.ClickException(f"cannot fetch {name}: {error}") from error
    return [line for line in text.split("\n") if line.strip()]


def _download(url: str) -> str:
    answer = httpx.get(url, timeout=_TIMEOUT, follow_redirects=True)
    answer.raise_for_status()
    return answer.content.decode("utf-8")


def upload(path: Path, url: str) -> None:
    """PUT a file to a URL. Raises click.ClickException, naming where the file stays."""
    try:
        with path.open("rb") as file:
            httpx.put(url, content=_blocks(file), timeout=_TIMEOUT).raise_for_status()
    except httpx.HTTPError as error:
        raise click.ClickException(f"cannot send {url}: {error}; answers are in {path}") from error


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(1 << 20):
        yield block


class Answers:
    """The answers of one batch, on disk. Use as a context manager."""

    def __init__(self, output: str, lines: list[str], directory: str | None = None) -> None:
        if is_url(output):
            folder = Path(directory or tempfile.gettempdir())
            self.path = folder / f"modulm-batch-{_digest([output])[:16]}.jsonl"
        else:
            self.path = Path(output)
        self._partial = self.path.with_name(self.path.name + ".partial")
        self._head = json.dumps({"input": _digest(lines)}) + "\n"
        #: line of the input -> place and length of its answer in the partial file
        self._places: dict[int, tuple[int, int]] = {}
        self._file: IO[bytes]

    @property
    def done(self) -> frozenset[int]:
        """Lines of the input that have an answer."""
        return frozenset(self._places)

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        end = self._resume()
        self._file = self._partial.open("r+b" if end else "w+b")
        self._file.truncate(end)
        self._file.seek(end)
        if not end:
            self._file.write(self._head.encode())
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, line: int, answer: dict[str, Any]) -> None:
        """Append the answer of one line."""
        row = json.dumps({"line": line, "answer": answer}, ensure_ascii=False).encode() + b"\n"
        self._places[line] = (self._file.tell(), len(row))
        self._file.write(row)
        self._file.flush()

    def finish(self) -> Path:
        """Write the output in the input's order, and drop the partial file."""
        ready = self.path.with_name(self.path.name + ".ready")
        with ready.open("w", encoding="utf-8") as output:
            for line in sorted(self._places):
                place, length = self._places[line]
                self._file.seek(place)
                row = json.loads(self._file.read(length))
                output.write(json.dumps(row["answer"], ensure_ascii=False) + "\n")
        ready.replace(self.path)
        self._file.close()
        self._partial.unlink()
        return self.path

    def _resume(self) -> int:
        """Find the answers of an earlier run; where the whole ones end, 0 if there are none."""
        if not self._partial.exists():
            return 0
        with self._partial.open("rb") as file:
            if file.readline() != self._head.encode():
                click.echo(f"{self._partial} is of another input: starting anew", err=True)
                return 0
            end = file.tell()
            for row in file:
                number = _line_of(row)
                if number is None:
                    break
                self._places[number] = (end, len(row))
                end += len(row)
        return end


def _line_of(row: bytes) -> int | None:
    """The line an answer belongs to; None for a row that was cut off."""
    if not row.endswith(b"\n"):
        return None
    try:
        return int(json.loads(row)["line"])
    except (ValueError, KeyError, TypeError):
        return None


def _digest(lines: list[str]) -> str:
    found = hashlib.sha256()
    for line in lines:
        found.update(line.encode() + b"\n")
    return found.hexdigest()
