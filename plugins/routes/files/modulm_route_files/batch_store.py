"""Stores batches on disk, shared by several servers.

A batch is run by the server that holds its lock. After a server stops or dies, the next one that
starts resumes its batches; lines with a record are not run again. After a power loss these are the
lines whose records were flushed, at most one interval of saves ago.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import logging
import os
import re
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from attrs import define, field

from modulm_route_files.batch import Batch
from modulm_route_files.disk import flush_folder, is_at, remove_abandoned, write_atomically

if TYPE_CHECKING:
    from modulm_route_files.store import FileStore

__all__ = ["BatchStore"]

log = logging.getLogger("modulm_server")

#: Ids of batches.
_ID = re.compile("batch_[0-9a-f]{32}")
#: Seconds between two saves of a running batch, and checks for its cancellation.
_CHECK_INTERVAL = 1.0
#: Maximum number of finished batches to keep.
_MAX_BATCHES = 1_000
#: Starts of a batch without a further record after which it is not started again.
_MAX_TRIES = 3


@define(eq=False)
class _Saves:
    """The saves of a batch, which run in threads. last, content: number and state of the latest."""

    lock: threading.Lock = field(factory=threading.Lock)
    last: int = 0
    content: bytes = b""


class BatchStore:
    """The batches in a folder, some of which run in this process."""

    def __init__(self, files: FileStore) -> None:
        self._files = files
        self._running: dict[str, tuple[Batch, asyncio.Task[None], int]] = {}
        self._known: dict[str, tuple[int, Batch]] = {}
        self._numbers = itertools.count(1)
        self._saves: dict[str, _Saves] = {}
        self._cleanups: set[asyncio.Future[None]] = set()
        #: The owners of batches that are being started.
        self._starting: dict[asyncio.Future[None], str] = {}

    @property
    def running(self) -> int:
        """The number of batches that run in this process."""
        return len(self._running)

    def count_running(self, owner: str) -> int:
        """The number of an owner's batches that run, or start, in this process."""
        running = [batch.owner for batch, _, _ in self._running.values()]
        return [*running, *self._starting.values()].count(owner)

    async def create(
        self, batch: Batch, work: Callable[[Batch], Coroutine[Any, Any, None]]
    ) -> None:
        """Save a batch in a thread and run it in this process, also if the caller is cancelled.
        Raises OSError if it cannot be saved.
        """

        async def begin() -> None:
            lock = await asyncio.to_thread(self._claim, batch)
            if lock is not None:
                self._begin(batch, work, lock)

        starting = asyncio.ensure_future(begin())
        self._starting[starting] = batch.owner
        starting.add_done_callback(self._starting.pop)
        await asyncio.shield(starting)

    def start(self, batch: Batch, work: Callable[[Batch], Coroutine[Any, Any, None]]) -> None:
        """Save a batch and run it in this process. Raises OSError if it cannot be saved.

        A batch whose last servers died without a record of it has failed. One that another server
        runs, or has ended meanwhile, is left alone.
        """
        lock = self._claim(batch)
        if lock is not None:
            self._begin(batch, work, lock)

    def _claim(self, batch: Batch) -> int | None:
        """Save a batch that this process is to run; returns its lock, None if it is not to."""
        stored = self._read(self._path(batch.id))
        # Only remove_leftovers takes the lock of a batch without a state, and only for a moment.
        lock = self._lock(batch.id, wait=stored is None)
        if lock is None:
            return None
        stored = self._read(self._path(batch.id))
        if stored is not None and stored.is_over:
            self._unlock(batch.id, lock)
            return None
        if batch.tries >= _MAX_TRIES:
            batch.give_up("server_died", f"the server died {batch.tries} times at this batch")
        batch.tries += 1
        try:
            # Saved before the first line is read, since that may crash the server.
            self._prepare_save(batch)()
        except BaseException:
            if stored is None:
                with suppress(OSError):  # a refused batch does not run later
                    self._path(batch.id).unlink(missing_ok=True)
            self._unlock(batch.id, lock)
            raise
        if batch.is_over:
            self._unlock(batch.id, lock)
            return None
        return lock

    def _begin(
        self, batch: Batch, work: Callable[[Batch], Coroutine[Any, Any, None]], lock: int
    ) -> None:
        task = asyncio.get_running_loop().create_task(self._run(batch, work))
        # Not in the task itself, which may be cancelled before it starts.
        task.add_done_callback(lambda done: self._finish(batch, lock, done))
        self._running[batch.id] = (batch, task, lock)

    def resume(self, work: Callable[[Batch], Coroutine[Any, Any, None]]) -> None:
        """Resume the batches that no server runs."""
        for batch in self.all():
            if not batch.is_over and batch.id not in self._running:
                try:
                    self.start(batch, work)
                except OSError as error:
                    log.error("Batch %s cannot be resumed: %s", batch.id, error.strerror)

    def get(self, identity: str) -> Batch | None:
        """A batch by its id."""
        if self._is_empty or not _ID.fullmatch(identity):
            return None
        return self._read(self._path(identity))

    @property
    def _is_empty(self) -> bool:
        """Whether there is certainly no batch, so that no folder is needed."""
        return not self._running and not self._files.lasting and not self._known

    def all(self) -> list[Batch]:
        """All stored batches, oldest first. Reads files: call it in a thread."""
        if self._is_empty:
            return []
        folder = self._files.folder / "batches"
        seen = {}
        for entry in os.scandir(folder):
            if entry.name.endswith(".json"):
                batch = self._read(Path(entry.path))
                if batch is not None:
                    seen[batch.id] = batch
        return sorted(seen.values(), key=lambda batch: batch.made)

    async def cancel(self, batch: Batch) -> None:
        """Cancel a batch, here or in the server that runs it. Waits for one that runs here."""
        local = self._running.get(batch.id)
        if local is not None:
            local[0].cancelled = True
            local[1].cancel()
            await asyncio.gather(local[1], return_exceptions=True)
        elif not batch.is_over:
            await asyncio.to_thread(self._request_cancellation, batch)

    def _request_cancellation(self, batch: Batch) -> None:
        request = self._path(batch.id, "cancel")
        request.touch()
        if self._files.lasting:
            flush_folder(request.parent)

    async def stop(self) -> None:
        """Stop running batches, to be resumed later."""
        await asyncio.gather(*self._starting, return_exceptions=True)
        running = list(self._running.values())
        for batch, task, _ in running:
            batch.tries = 0
            task.cancel()
        tasks = [task for _, task, _ in running]
        await asyncio.gather(*tasks, *self._cleanups, return_exceptions=True)

    async def _run(self, batch: Batch, work: Callable[[Batch], Coroutine[Any, Any, None]]) -> None:
        doing = asyncio.ensure_future(work(batch))
        try:
            while not doing.done():
                await asyncio.wait({doing}, timeout=_CHECK_INTERVAL)
                if self._path(batch.id, "cancel").exists():
                    batch.cancelled = True
                    doing.cancel()
                    await asyncio.wait({doing})
                save = self._prepare_save(batch)
                await asyncio.to_thread(self._try, save)
        finally:
            doing.cancel()
            while not doing.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({doing})

    def _finish(self, batch: Batch, lock: int, task: asyncio.Task[None]) -> None:
        """Record the end of a batch's task, and release its lock."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and not batch.is_over:
            batch.fail(error)
        if batch.cancelled and not batch.is_over:
            batch.enter("cancelled")
        self._try(self._prepare_save(batch))
        self._running.pop(batch.id, None)
        self._unlock(batch.id, lock)
        cleanup = asyncio.ensure_future(asyncio.to_thread(self._forget_old))
        self._cleanups.add(cleanup)
        cleanup.add_done_callback(self._cleanups.discard)

    def _forget_old(self) -> None:
        finished = [batch for batch in self.all() if batch.is_over]
        for batch in finished[: max(0, len(finished) - _MAX_BATCHES)]:
            self._known.pop(batch.id, None)
            self._saves.pop(batch.id, None)
            self._path(batch.id).unlink(missing_ok=True)

    def _prepare_save(self, batch: Batch) -> Callable[[], None]:
        """Return a function for any thread that saves the batch as it is now. Raises OSError.

        It does nothing if a later state was saved before it.
        """
        content, number = msgspec.json.encode(batch.table()), next(self._numbers)
        path, saves = self._path(batch.id), self._saves.setdefault(batch.id, _Saves())
        outputs = batch.output, batch.errors

        def save() -> None:
            with saves.lock:
                if number <= saves.last:
                    return
                if content != saves.content:
                    # What the state counts is on the disk before it.
                    self._files.flush(*outputs)
                    write_atomically(path, content, self._files.lasting)
                    saves.content = content
                    self._known[batch.id] = (path.stat().st_mtime_ns, batch)
                saves.last = number

        return save

    def _try(self, save: Callable[[], None]) -> None:
        """Save if possible. On a full disk, the last saved state stays valid."""
        try:
            save()
        except OSError as error:
            log.warning("A batch cannot be saved: %s", error.strerror)

    def _read(self, path: Path) -> Batch | None:
        identity = path.stem
        running = self._running.get(identity)
        if running is not None:
            return running[0]
        try:
            changed = path.stat().st_mtime_ns
            known = self._known.get(identity)
            if known is None or known[0] != changed:
                known = changed, Batch.of(msgspec.json.decode(path.read_bytes()))
                self._known[identity] = known
            return known[1]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("Batch %s cannot be read: %s", identity, error)
            return None

    def _path(self, identity: str, kind: str = "json") -> Path:
        return self._files.folder / "batches" / f"{identity}.{kind}"

    def _lock(self, identity: str, wait: bool = False) -> int | None:
        """A descriptor that holds the batch's lock; None if another server holds it.

        wait: until it is free. Raises OSError if the file cannot be created or locked, as on file
        systems without locks.
        """
        path = self._path(identity, "lock")
        while True:
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                if is_at(descriptor, path):
                    return descriptor
            except BlockingIOError:  # another server holds it
                wait = False
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # held by another server, or removed by the one that held it
            if not wait:
                return None

    def remove_leftovers(self) -> None:
        """Remove what servers left that died or lost power: half-written states, locks of batches
        that are over. Raises OSError.
        """
        folder = self._files.folder / "batches"
        for entry in list(os.scandir(folder)):
            path = folder / entry.name
            if entry.name.endswith(".new"):
                remove_abandoned(path)
            elif path.suffix in (".lock", ".cancel") and _ID.fullmatch(path.stem):
                self._remove_old_lock(path.stem)

    def _remove_old_lock(self, identity: str) -> None:
        """Remove the lock of a batch that is over, or was never saved, if no server holds it."""
        lock = self._lock(identity)
        if lock is None:
            return
        batch = self._read(self._path(identity))
        if batch is None or batch.is_over:
            self._unlock(identity, lock)
        else:
            os.close(lock)

    def _unlock(self, identity: str, descriptor: int) -> None:
        for kind in ("lock", "cancel"):  # what stays is removed by the next start
            with suppress(OSError):
                self._path(identity, kind).unlink(missing_ok=True)
        os.close(descriptor)
