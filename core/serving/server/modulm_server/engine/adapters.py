"""The adapters of an engine, by the names that requests use. Runs in the engine's process.

Each reading of an adapter's files makes a version with its own name in the executor, scheduler and
prefix cache. Requests keep the version they began with, also if the adapter is reloaded or unloaded
meanwhile, and never share cache blocks with another version. Files are read on separate threads,
while the engine steps.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define, evolve, field, frozen

from modulm.contracts.requests import Finish, Request, StepEvents
from modulm.errors import (
    CheckpointError,
    EngineError,
    ModulmError,
    NotFound,
    RequestError,
    UnsupportedError,
)
from modulm_frontend.lora import active_from, files_of, invocation_tokens

if TYPE_CHECKING:
    from modulm.engine.core.engine_core import EngineCore

__all__ = ["Adapter", "AdapterRegistry"]

log = logging.getLogger("modulm.engine")

#: Adapters read at the same time.
_READERS = 4


@frozen
class Adapter:
    """An adapter that requests may name. path: the folder of its files. owner: of the API key that
    loaded it and alone may use it; None for all.

    Shown to clients: parent, the model it belongs to, None for the served one; root, its origin,
    None for the folder.
    """

    name: str
    path: str
    parent: str | None = None
    root: str | None = None
    owner: str | None = None


@define(eq=False)
class _Version:
    """One reading of an adapter's files.

    key: its name in the engine. invocation: token ids after which it applies; empty: from the first
    token. users: ids of its requests. loaded: whether the executor holds it.
    """

    adapter: Adapter
    key: str
    invocation: tuple[int, ...]
    users: set[str] = field(factory=set)
    loaded: bool = True


class AdapterRegistry:
    """Tracks the loaded adapters and the requests that use them. Thread-safe.

    tell: receives the ends of requests that never reached the engine. changed: receives all
    adapters whenever one is loaded or unloaded.
    """

    def __init__(
        self,
        core: EngineCore,
        tell: Callable[[StepEvents], None],
        changed: Callable[[tuple[Adapter, ...]], None] = lambda adapters: None,
    ) -> None:
        self._core = core
        self._deliver = tell
        self._changed = changed
        self._lock, self._announcing = threading.Lock(), threading.Lock()
        self._current: dict[str, _Version] = {}
        self._versions: dict[str, _Version] = {}
        self._using: dict[str, _Version] = {}
        self._loading: dict[str, tuple[Adapter, Future[None]]] = {}
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="modulm-adapters")

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """All loaded adapters, in loading order."""
        with self._lock:
            return tuple(version.adapter for version in self._current.values())

    # Loading and unloading.

    def load(self, adapter: Adapter, replace: bool = False) -> Future[None]:
        """Load an adapter for new requests. replace: reload it if the name is loaded.

        The future raises RequestError for a name in use or files that do not fit; the loaded
        adapters are unchanged then.
        """
        with self._lock:
            pending = self._loading.get(adapter.name)
            if pending is not None and pending[0] == adapter:
                return pending[1]
            try:
                self._check(adapter, replace)
            except ModulmError as error:
                refused: Future[None] = Future()
                refused.set_exception(error)
                return refused
            answer = self._readers.submit(self._load, adapter)
            self._loading[adapter.name] = adapter, answer
        answer.add_done_callback(lambda _: self._loaded(adapter.name, answer))
        return answer

    def _check(self, adapter: Adapter, replace: bool) -> None:
        if not self._core.info.limit("adapters", "slots"):
            raise UnsupportedError("the engine runs without adapters: start it with --enable-lora")
        if adapter.name in self._core.info.models:
            raise RequestError(f"{adapter.name!r} is the name of the model itself", "lora_name")
        if adapter.name in self._loading:
            raise RequestError(f"adapter {adapter.name!r} is already being loaded", "lora_name")
        if adapter.name in self._current and not replace:
            raise RequestError(
                f"adapter {adapter.name!r} is already loaded; load_inplace: true reloads it",
                "lora_name",
            )

    def _loaded(self, name: str, answer: Future[None]) -> None:
        with self._lock:
            if self._loading.get(name, (None, None))[1] is answer:
                del self._loading[name]

    def _load(self, adapter: Adapter) -> None:
        path = Path(adapter.path)
        key = ""
        try:
            key = f"{adapter.name}@{_stamp(path)}"
            invocation = invocation_tokens(path)
            with self._lock:
                known = self._versions.get(key)
                version = known or _Version(adapter, key, invocation)
                self._versions[key] = version
            self._core.executor.add_adapter(key, path)
        except (CheckpointError, OSError) as error:
            self._drop(key)
            raise _unusable(adapter, error, "lora_path") from error
        except BaseException:
            self._drop(key)
            raise
        with self._lock:
            version.adapter, version.loaded = adapter, True
            before = self._current.get(adapter.name)
            self._current[adapter.name] = version
            if before is not version:
                self._retire(before)
        self._announce(adapter.name, "loaded")

    def _announce(self, name: str, what: str) -> None:
        log.info("adapter %s is %s", name, what)
        with self._announcing:
            self._changed(self.adapters)

    def _drop(self, key: str) -> None:
        """Remove the version of files that could not be read, unless it is in use."""
        with self._lock:
            version = self._versions.get(key)
            if version is not None and not self._needed(version):
                del self._versions[key]

    def unload(self, name: str) -> Future[None]:
        """Unload an adapter; its files are released once the last request that uses it ends.

        The future raises NotFound.
        """
        answer: Future[None] = Future()
        with self._lock:
            version = self._current.pop(name, None)
            self._retire(version)
        if version is None:
            answer.set_exception(NotFound(f"there is no adapter {name!r} here", "lora_name"))
            return answer
        self._announce(name, "unloaded")
        answer.set_result(None)
        return answer

    def _needed(self, version: _Version) -> bool:
        return bool(version.users) or self._current.get(version.adapter.name) is version

    def _retire(self, version: _Version | None) -> None:
        """Remove a version from the executor if nothing needs it. Holds the lock."""
        if version is None or self._needed(version):
            return
        self._versions.pop(version.key, None)
        with suppress(RuntimeError):  # the readers are shut down
            self._readers.submit(self._remove, version.key)

    def _remove(self, key: str) -> None:
        with self._lock, suppress(EngineError, UnsupportedError):
            if key not in self._versions:
                self._core.executor.remove_adapter(key)

    # Requests.

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit requests to the engine, once the adapters they name are in memory.

        Raises NotFound, and what `EngineCore.submit` raises. If an adapter's files cannot be read,
        its requests end with that error.
        """
        if all(request.adapter is None for request in requests):
            self._core.submit(*requests)
            return
        with self._lock:
            for request in requests:
                if request.adapter is not None and request.adapter not in self._current:
                    raise NotFound(f"there is no adapter {request.adapter!r} here", "model")
            pinned = [self._pin(request) for request in requests]
        self._readers.submit(self._hand_in, pinned)

    def _pin(self, request: Request) -> Request:
        """The request with the current version of its adapter, which is kept until it ends."""
        if request.adapter is None:
            return request
        version = self._current[request.adapter]
        version.users.add(request.id)
        self._using[request.id] = version
        first: int | None = 0
        if version.invocation:
            first = active_from(request.prompt.tolist(), version.invocation)
        return evolve(request, adapter=None if first is None else version.key,
                      adapter_from=first or 0)  # fmt: skip

    def _hand_in(self, requests: Sequence[Request]) -> None:
        try:
            for version in {self._using.get(request.id) for request in requests}:
                if version is not None:
                    self._hold(version)
            with self._lock:
                left = [r for r in requests if r.adapter is None or r.id in self._using]
                self._core.submit(*left)
        except Exception as error:
            if not isinstance(error, ModulmError):
                log.exception("the requests of an adapter could not be submitted")
            ends = [Finish(request.id, "error", None, error) for request in requests]
            self.release(ends)
            self._deliver(StepEvents(finished=ends))

    def _hold(self, version: _Version) -> None:
        """Load a version into host memory. Raises RequestError if its files have become invalid."""
        executor = self._core.executor
        try:
            if version.loaded:
                with suppress(UnsupportedError):  # the step then reads the files
                    executor.prepare_adapter(version.key)
            else:
                executor.add_adapter(version.key, Path(version.adapter.path))
                version.loaded = True
        except CheckpointError as error:
            raise _unusable(version.adapter, error, "model") from error

    def release(self, ends: Sequence[Finish]) -> None:
        """Release the adapters of requests that have ended."""
        if self._using:
            for end in ends:
                self.forget(end.request)

    def forget(self, request: str) -> None:
        """Release the adapter of a request that has ended or was not submitted."""
        with self._lock:
            version = self._using.pop(request, None)
            if version is not None:
                version.users.discard(request)
                self._retire(version)

    def sleep(self, level: int) -> None:
        """See `EngineCore.sleep`. Level 2 drops the executor's adapters with the weights."""
        self._core.sleep(level)
        if level > 1:
            with self._lock:
                for version in self._versions.values():
                    version.loaded = False

    def close(self) -> None:
        """Stop reading files."""
        self._readers.shutdown(wait=False, cancel_futures=True)


def _unusable(adapter: Adapter, error: Exception, param: str) -> RequestError:
    """An error that names the adapter and the cause, without the paths of folders."""
    message = str(error).replace(f"{adapter.path}/", "").replace(adapter.path, adapter.name)
    if isinstance(error, OSError) and error.strerror:
        message = f"its folder: {error.strerror}"
    return RequestError(f"adapter {adapter.name!r} cannot be loaded: {message}", param)


def _stamp(path: Path) -> str:
    """A fingerprint of the files of an adapter, which changes when one of them does. Raises
    OSError.
    """
    folder = files_of(path)
    digest = hashlib.sha256(b"" if folder == path else path.name.encode())
    for file in sorted(folder.iterdir()):
        if file.is_file():
            stat = file.stat()
            times = stat.st_mtime_ns, stat.st_ctime_ns
            digest.update(repr((file.name, stat.st_dev, stat.st_ino, stat.st_size, times)).encode())
    return digest.hexdigest()[:16]
