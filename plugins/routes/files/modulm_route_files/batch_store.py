"""Stores batches on disk, shared by several servers.

A batch is run by the server that holds its lock. After a server stops or dies, the next one that
starts resumes its batches; lines with a record are not run again.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from modulm_route_files.batch import Batch
from modulm_route_files.store import write_atomically

if TYPE_CHECKING:
    from modulm_route_files.store import FileStore

__all__ = ["BatchStore"]

log = logging.getLogger("modulm_server")

#: Seconds between two saves of a running batch, and checks for its cancellation.
_CHECK_INTERVAL = 1.0
#: Maximum number of finished batches to keep.
_MAX_BATCHES = 1_000
#: Starts of a batch without a further record after which it is not started again.
_MAX_TRIES = 3


class BatchStore:
    """The batches in a folder, some of which run in this process."""

    def __init__(self, files: FileStore) -> None:
        self._files = files
        self._running: dict[str, tuple[Batch, asyncio.Task[None], int]] = {}
        self._known: dict[str, tuple[int, Batch]] = {}

    @property
    def running(self) -> int:
        """The number of batches that run in this process."""
        return len(self._running)

    def count_running(self, owner: str) -> int:
        """The number of an owner's batches that run in this process."""
        return sum(batch.owner == owner for batch, _, _ in self._running.values())

    def start(self, batch: Batch, work: Callable[[Batch], Coroutine[Any, Any, None]]) -> None:
        """Save a batch and run it in this process. Raises OSError if it cannot be saved.

        A batch whose last servers died without a record of it has failed.
        """
        lock = self._lock(batch.id)
        if lock is None:
            return
        if batch.tries >= _MAX_TRIES:
            batch.give_up("server_died", f"the server died {batch.tries} times at this batch")
        batch.tries += 1
        try:
            # Saved before the first line is read, since that may crash the server.
            self._save(batch)
        except BaseException:
            self._unlock(batch.id, lock)
            raise
        if batch.is_over:
            self._unlock(batch.id, lock)
            return
        task = asyncio.get_running_loop().create_task(self._run(batch, work))
        # Not in the task itself, which may be cancelled before it starts.
        task.add_done_callback(lambda _: self._finish(batch, lock))
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
        return next((batch for batch in self.all() if batch.id == identity), None)

    def all(self) -> list[Batch]:
        """All stored batches, oldest first."""
        if not self._running and not self._files.lasting and not self._known:
            return []
        folder = self._files.folder / "batches"
        seen = {}
        for entry in os.scandir(folder):
            if entry.name.endswith(".json"):
                batch = self._read(entry)
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
            self._path(batch.id, "cancel").touch()

    async def stop(self) -> None:
        """Stop running batches, to be resumed later."""
        running = list(self._running.values())
        for batch, task, _ in running:
            batch.tries = 0
            task.cancel()
        tasks = [task for _, task, _ in running]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, batch: Batch, work: Callable[[Batch], Coroutine[Any, Any, None]]) -> None:
        doing = asyncio.ensure_future(work(batch))
        try:
            while not doing.done():
                await asyncio.wait({doing}, timeout=_CHECK_INTERVAL)
                if self._path(batch.id, "cancel").exists():
                    batch.cancelled = True
                    doing.cancel()
                    await asyncio.wait({doing})
                self._try_to_save(batch)
        finally:
            doing.cancel()
            while not doing.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({doing})

    def _finish(self, batch: Batch, lock: int) -> None:
        """Record the end of a batch's task, and release its lock."""
        if batch.cancelled and not batch.is_over:
            batch.enter("cancelled")
        self._try_to_save(batch)
        self._running.pop(batch.id, None)
        self._unlock(batch.id, lock)
        self._forget_old()

    def _forget_old(self) -> None:
        finished = [batch for batch in self.all() if batch.is_over]
        for batch in finished[: max(0, len(finished) - _MAX_BATCHES)]:
            self._known.pop(batch.id, None)
            self._path(batch.id).unlink(missing_ok=True)

    def _save(self, batch: Batch) -> None:
        path = self._path(batch.id)
        write_atomically(path, msgspec.json.encode(batch.table()), self._files.lasting)
        self._known[batch.id] = (path.stat().st_mtime_ns, batch)

    def _try_to_save(self, batch: Batch) -> None:
        """Save a batch if possible. On a full disk, the last saved state stays valid."""
        try:
            self._save(batch)
        except OSError as error:
            log.warning("Batch %s cannot be saved: %s", batch.id, error.strerror)

    def _read(self, entry: os.DirEntry[str]) -> Batch | None:
        identity = entry.name.removesuffix(".json")
        if identity in self._running:
            return self._running[identity][0]
        try:
            changed = entry.stat().st_mtime_ns
            if identity not in self._known or self._known[identity][0] != changed:
                table = msgspec.json.decode(Path(entry.path).read_bytes())
                self._known[identity] = (changed, Batch.of(table))
            return self._known[identity][1]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("Batch %s cannot be read: %s", identity, error)
            return None

    def _path(self, identity: str, kind: str = "json") -> Path:
        return self._files.folder / "batches" / f"{identity}.{kind}"

    def _lock(self, identity: str) -> int | None:
        """A descriptor that holds the batch's lock; None if another server holds it."""
        descriptor = os.open(self._path(identity, "lock"), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor

    def _unlock(self, identity: str, descriptor: int) -> None:
        with suppress(OSError):
            self._path(identity, "lock").unlink(missing_ok=True)
            self._path(identity, "cancel").unlink(missing_ok=True)
        os.close(descriptor)
