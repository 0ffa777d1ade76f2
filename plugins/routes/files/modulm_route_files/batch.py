"""Runs a batch: reads a file of requests, runs several at a time, writes a file of responses.

An invalid line gets a record in the error file; the other lines run.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from io import BytesIO
from os import SEEK_END
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
from attrs import asdict, define, field, fields, filters

from modulm_route_files.lines import LinesError, count_lines, read_lines
from modulm_route_files.objects import Counts
from modulm_server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from io import RawIOBase
    from pathlib import Path

    from modulm_route_files.lines import Line
    from modulm_route_files.objects import BatchCard, BatchError
    from modulm_route_files.slots import Slots
    from modulm_route_files.store import FileStore, StoredFile
    from modulm_server.loopback import LoopbackClient

__all__ = ["ENDPOINTS", "Batch"]

log = logging.getLogger("modulm_server")

#: The endpoints that a batch may use.
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
#: Error codes of a 503 after which a line is tried again.
_TRANSIENT = (b'"engine_stalled"', b'"engine_restarting"', b'"replica_died"', b'"overloaded"')
#: Seconds between attempts while the server is full.
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0)


class _Stopping(Exception):
    """The server is shutting down; lines without a record are left to the next one."""


@define(eq=False)
class Batch:
    """A batch and its progress.

    input, output, errors: ids of files. lasts: seconds that its output files are kept. made: time
    of creation in nanoseconds of Unix time. tries: starts since its last record or orderly stop.
    line_limit: longest line in bytes. cancelled: its cancellation was requested.
    """

    owner: str
    endpoint: str
    window: str
    input: str
    metadata: dict[str, str] | None = None
    lasts: int | None = None
    id: str = field(factory=lambda: f"batch_{uuid4().hex}")
    made: int = field(factory=time.time_ns)
    status: str = "validating"
    times: dict[str, int] = field(factory=dict)
    counts: Counts = field(factory=lambda: Counts(total=0, completed=0, failed=0))
    output: str | None = None
    errors: str | None = None
    trouble: list[BatchError] = field(factory=list)
    tries: int = 0
    line_limit: int = 64 << 20
    cancelled: bool = False
    _writing: asyncio.Lock = field(factory=asyncio.Lock, init=False, repr=False)

    @property
    def is_over(self) -> bool:
        """Whether the batch has completed, failed or been cancelled."""
        return self.status in ("completed", "failed", "cancelled")

    def table(self) -> dict[str, Any]:
        """The state to save for another server."""
        return asdict(self, filter=filters.exclude(*_unsaved()))

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Batch:
        """Load a batch from its saved state."""
        return cls(**table)

    def card(self) -> BatchCard:
        """OpenAI's batch object."""
        times = self.times
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.trouble} if self.trouble else None,
            "input_file_id": self.input,
            "completion_window": self.window,
            "status": self.status,
            "output_file_id": self.output,
            "error_file_id": self.errors,
            "created_at": self.made // 1_000_000_000,
            "expires_at": None,
            "expired_at": None,
            "in_progress_at": times.get("in_progress"),
            "finalizing_at": times.get("finalizing"),
            "completed_at": times.get("completed"),
            "failed_at": times.get("failed"),
            "cancelling_at": times.get("cancelling"),
            "cancelled_at": times.get("cancelled"),
            "request_counts": {**self.counts},
            "metadata": self.metadata,
        }

    def enter(self, status: str) -> None:
        """Enter a new stage."""
        self.status = status
        self.times[status] = int(time.time())

    async def run(self, files: FileStore, loopback: LoopbackClient, slots: Slots) -> None:
        """Run all lines that have no record yet."""
        try:
            await self._run(files, loopback, slots)
        except asyncio.CancelledError:
            if self.cancelled:
                self.enter("cancelled")
            raise
        except _Stopping:
            self.tries = 0
        except LinesError as error:
            self.give_up("lines", str(error))
        except Exception as error:
            self.fail(error)

    def give_up(self, code: str, message: str) -> None:
        """End the batch with an error."""
        self.trouble.append(_error(code, message))
        self.enter("failed")

    def fail(self, error: Exception) -> None:
        """End the batch with an error, which may come from one of its lines."""
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, OSError):
            trouble = _error("storage", error.strerror or "the files cannot be used")
        elif isinstance(error, ApiError):
            trouble = _error(error.code or "storage", error.message)
        else:
            log.error("Batch %s failed", self.id, exc_info=error)
            trouble = _error("internal_error", "the server failed to run the batch")
        self.trouble.append(trouble)
        self.enter("failed")

    async def _run(self, files: FileStore, loopback: LoopbackClient, slots: Slots) -> None:
        source = await asyncio.to_thread(files.find, self.input)
        if source is None:
            self.trouble.append(_error("input_file", "the input file does not exist"))
            self.enter("failed")
            return
        total = await asyncio.to_thread(count_lines, source.path, self.line_limit)
        if self.status == "validating":
            self.counts["total"] = total
            self.enter("in_progress")
        good = await asyncio.to_thread(self._file, files, "output")
        bad = await asyncio.to_thread(self._file, files, "error")
        self.output, self.errors = good.id, bad.id
        done = await asyncio.to_thread(lambda: (_done(good.path), _done(bad.path)))
        self.counts.update({"completed": len(done[0]), "failed": len(done[1])})
        lines = read_lines(source.path, self.line_limit, self.endpoint, done[0] | done[1])
        await self._run_lines(lines, loopback, slots, good.path, bad.path)
        self.enter("finalizing")
        if not bad.size:
            await asyncio.to_thread(files.remove, bad)
            self.errors = None
        await asyncio.to_thread(files.flush, self.output, self.errors)
        self.enter("completed")

    def _file(self, files: FileStore, kind: str) -> StoredFile:
        """The output or error file: an existing one, or a new one.

        Its id follows from the batch's, so that a server finds it that the state does not name yet.
        """
        digest = hashlib.blake2b(f"{self.id} {kind}".encode(), digest_size=16).hexdigest()
        identity = (self.output if kind == "output" else self.errors) or f"file-{digest}"
        file = files.find(identity)
        if file is None:
            name = f"{self.id}_{kind}.jsonl"
            file = files.make(self.owner, name, "batch_output", self.lasts, identity)
            files.write(file, BytesIO())
        return file

    async def _run_lines(
        self,
        lines: Iterator[Line],
        loopback: LoopbackClient,
        slots: Slots,
        good: Path,
        bad: Path,
    ) -> None:
        stopping = False

        async def one(line: Line) -> None:
            nonlocal stopping
            try:
                await self._line(line, loopback, answers, refusals)
            except _Stopping:
                stopping = True
            finally:
                slots.release(len(line.body))

        with good.open("ab", buffering=0) as answers, bad.open("ab", buffering=0) as refusals:
            async with asyncio.TaskGroup() as group:
                while (line := await asyncio.to_thread(next, lines, None)) is not None:
                    await slots.acquire(len(line.body))
                    if stopping:
                        slots.release(len(line.body))
                        break
                    group.create_task(one(line))
        if stopping:
            raise _Stopping

    async def _line(
        self, line: Line, loopback: LoopbackClient, good: RawIOBase, bad: RawIOBase
    ) -> None:
        """Run a line and write its record. Raises _Stopping if the server shuts down."""
        record: dict[str, Any] = {
            "id": f"batch_req_{self.id.removeprefix('batch_')}_{line.number}",
            "custom_id": line.custom_id,
            "response": None,
            "error": None,
        }
        if line.error is not None:
            record["error"] = {"code": "invalid_request", "message": line.error}
            fine = False
        else:
            status, answer = await self._post(loopback, line.body)
            if status == 503 and not _is_transient(answer):
                raise _Stopping
            fine = status == 200
            record["response"] = {
                "status_code": status,
                "request_id": record["id"],
                # JSON contains line breaks only between its tokens.
                "body": msgspec.Raw(answer.replace(b"\n", b" ")),
            }
        await self._write(good if fine else bad, record)

    async def _write(self, target: RawIOBase, record: Mapping[str, Any]) -> None:
        """Append and count a record; a cancelled caller waits for it too. Raises OSError."""
        async with self._writing:
            append = asyncio.to_thread(lambda: _append(target, msgspec.json.encode(record) + b"\n"))
            writing = asyncio.ensure_future(append)
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.wait({writing})
                raise
            finally:
                if writing.done() and writing.exception() is None:
                    fine = record["response"] and record["response"]["status_code"] == 200
                    self.counts["completed" if fine else "failed"] += 1
                    self.tries = 0

    async def _post(self, loopback: LoopbackClient, body: bytes) -> tuple[int, bytes]:
        """POST a request, retrying while the server is full or the engine may recover."""
        for pause in _PAUSES:
            status, answer = await loopback.post(self.endpoint, body, self.owner)
            if status != 429 and not (status == 503 and _is_transient(answer)):
                return status, answer
            await asyncio.sleep(pause)
        return await loopback.post(self.endpoint, body, self.owner)


def _is_transient(answer: bytes) -> bool:
    """Whether a 503 is temporary: a stalled or dead engine, too many bytes in progress."""
    return any(code in answer for code in _TRANSIENT)


def _append(target: RawIOBase, record: bytes) -> None:
    """Append a record, completely or not at all. Raises OSError."""
    before = target.seek(0, SEEK_END)
    written = 0
    try:
        while written < len(record):
            written += target.write(record[written:]) or 0
    except OSError:
        target.truncate(before)
        raise


def _done(path: Path) -> set[int]:
    """The numbers of lines with a record. Truncates an incomplete record."""
    numbers, whole = set(), 0
    with path.open("rb+") as records:
        for record in records:
            try:
                number = int(msgspec.json.decode(record)["id"].rpartition("_")[2])
            except (ValueError, TypeError, KeyError):
                break
            if not record.endswith(b"\n"):
                break
            numbers.add(number)
            whole += len(record)
        records.truncate(whole)
    return numbers


def _unsaved() -> tuple[Any, Any]:
    """The fields that only the running process knows."""
    return fields(Batch).cancelled, fields(Batch)._writing


def _error(code: str, message: str) -> BatchError:
    return {"code": code, "message": message, "param": None, "line": None}
