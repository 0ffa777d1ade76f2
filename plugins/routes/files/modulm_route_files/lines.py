"""Reads the lines of a batch file, one at a time and with limits."""

from __future__ import annotations

from hashlib import blake2b
from typing import IO, TYPE_CHECKING, Any

import msgspec
from attrs import frozen

from modulm_server.errors import ApiError
from modulm_server.json_body import check_counts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

__all__ = ["MAX_LINES", "Line", "LinesError", "check_lines", "count_lines", "read_lines"]

#: Lines of a batch, and blank lines between them.
MAX_LINES = 50_000


class LinesError(ValueError):
    """A file that is no batch; the message is for the client."""


@frozen
class Line:
    """A line of a batch.

    number: its index among the lines that are not blank. body: the JSON of its request. error: why
    it cannot run, or None.
    """

    number: int
    custom_id: Any
    body: bytes = b""
    error: str | None = None


class _Request(msgspec.Struct):
    custom_id: Any = None
    method: Any = "POST"
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _Body(msgspec.Struct):
    stream: Any = None


def check_lines(source: IO[bytes], longest: int) -> None:
    """Check number, length and size as JSON of the lines; longest: bytes of a line.

    Raises LinesError.
    """
    for number, text in enumerate(_texts(source, longest), 1):
        try:
            check_counts(text)
        except ApiError as error:
            raise LinesError(f"line {number}: {error.message}") from error


def count_lines(path: Path, longest: int) -> int:
    """Count the lines that are not blank. Raises LinesError if there are none, or too many."""
    with path.open("rb") as source:
        number = sum(1 for _ in _texts(source, longest))
    if not number:
        raise LinesError(f"a batch must have 1 to {MAX_LINES} lines")
    return number


def read_lines(
    path: Path, longest: int, endpoint: str, skipped: Collection[int] = ()
) -> Iterator[Line]:
    """Yield the lines except those whose numbers are skipped. Raises LinesError."""
    seen: set[bytes] = set()
    with path.open("rb") as source:
        for number, text in enumerate(_texts(source, longest)):
            line = _line(number, text, endpoint, seen)
            if number not in skipped:
                yield line


def _texts(source: IO[bytes], longest: int) -> Iterator[bytes]:
    """Yield the lines that are not blank. Raises LinesError beyond a limit."""
    count = blank = 0
    while raw := source.readline(longest + 1):
        if len(raw) > longest:
            raise LinesError(f"line {count + blank + 1} has more than {longest} bytes")
        text = raw.removeprefix(b"\xef\xbb\xbf").strip()
        count, blank = (count + 1, blank) if text else (count, blank + 1)
        if max(count, blank) > MAX_LINES:
            raise LinesError(f"a batch must have 1 to {MAX_LINES} lines")
        if text:
            yield text


def _line(number: int, text: bytes, endpoint: str, seen: set[bytes]) -> Line:
    try:
        check_counts(text)
        request = msgspec.json.decode(text, type=_Request)
    except ApiError as error:
        return Line(number, None, error=error.message)
    except msgspec.ValidationError:
        return Line(number, None, error="the line is not an object")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Line(number, None, error="the line is not valid JSON")
    name = request.custom_id
    if not isinstance(name, str) or not 0 < len(name) <= 512:
        return Line(number, None, error="custom_id must be a string of 1 to 512 characters")
    return Line(number, name, bytes(request.body), _fault(request, name, endpoint, seen))


def _fault(request: _Request, name: str, endpoint: str, seen: set[bytes]) -> str | None:
    """Why a request cannot run, or None."""
    digest = blake2b(name.encode(errors="surrogatepass"), digest_size=16).digest()
    if digest in seen:
        return f"custom_id: {name[:64]!r} occurs twice"
    seen.add(digest)
    if request.method != "POST":
        return "method must be POST"
    if request.url != endpoint:
        return f"url must be the batch's endpoint, {endpoint}"
    try:
        body = msgspec.json.decode(request.body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "body must be an object"
    return "body.stream is not supported in a batch" if body.stream else None
