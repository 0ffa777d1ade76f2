"""Adapters of an engine by the names that requests use, where the engine runs.

What is read of an adapter's files is a version of it, with a name of its own in executor, scheduler
and prefix cache. So an adapter that is loaded anew, or unloaded, while requests use it is kept for
them until the last one ends, and no block of the one is found for the other. Files are read on
threads of their own, beside the steps.
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

#: Adapters that are read at once.
_READERS = 4


@frozen
class Adapter:
    """An adapter as it is asked for. name: what requests say; path: the folder of its files.

    What clients are told: parent, the model that it belongs to, None for the one that is served;
    root, where it is from, None for the folder's name.
    """

    name: str
    path: str
    parent: str | None = None
    root: str | None = None


@define(eq=False)
class _Version:
    """What was read of an adapter once. key: its name in the engine; invocation: token ids from
    which on it is used, none: from the first; users: ids of requests; held: the executor has it.
    """

    adapter: Adapter
    key: str
    invocation: tuple[int, ...]
    users: set[str] = field(factory=set)
    held: bool = True


class AdapterRegistry:
    """Which adapters there are, and which requests use them. May be used from any thread.

    tell: gets the ends of requests that never came to the engine. changed: is told of all adapters
    when one comes or goes.
    """

    def __init__(
        self,
        core: EngineCore,
        tell: Callable[[StepEvents], None],
        changed: Callable[[tuple[Adapter, ...]], None] = lambda adapters: None,
    ) -> None:
        self._core = core
        self._tell = tell
        self._changed = changed
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self._current: dict[str, _Version] = {}
        self._versions: dict[str, _Version] = {}
        self._using: dict[str, _Version] = {}
        self._loading: dict[str, tuple[Adapter, Future[None]]] = {}
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="modulm-adapters")

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """All that requests may name, in the order in which they came."""
        with self._lock:
            return tuple(version.adapter for version in self._current.values())

    # Adapters come and go.

    def load(self, adapter: Adapter, replace: bool = False) -> Future[None]:
        """Read an adapter; requests that come from then on may name it. replace: also one that is
        there. The answer raises RequestError for a name that is taken and for files that do not
        fit, and nothing has changed then.
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
            raise RequestError(f"adapter {adapter.name!r} is being loaded already", "lora_name")
        if adapter.name in self._current and not replace:
            raise RequestError(
                f"adapter {adapter.name!r} is loaded already; load_inplace: true loads it anew",
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
                found = self._versions.get(key)
                version = found or _Version(adapter, key, invocation)
                self._versions[key] = version
            self._core.executor.add_adapter(key, path)
        except (CheckpointError, OSError) as error:
            self._drop(key)
            raise _unusable(adapter, error, "lora_path") from error
        except BaseException:
            self._drop(key)
            raise
        with self._lock:
            version.adapter, version.held = adapter, True
            before = self._current.get(adapter.name)
            self._current[adapter.name] = version
            if before is not version:
                self._retire(before)
        self._say(adapter.name, "loaded")

    def _say(self, name: str, what: str) -> None:
        log.info("adapter %s is %s", name, what)
        with self._telling:
            self._changed(self.adapters)

    def _drop(self, key: str) -> None:
        """Files that could not be read gave no version, unless there was one before."""
        with self._lock:
            version = self._versions.get(key)
            if version is not None and not self._needed(version):
                del self._versions[key]

    def unload(self, name: str) -> Future[None]:
        """Forget an adapter once the requests that use it have ended.

        The answer raises NotFound.
        """
        answer: Future[None] = Future()
        with self._lock:
            version = self._current.pop(name, None)
            self._retire(version)
        if version is None:
            answer.set_exception(NotFound(f"there is no adapter {name!r} here", "lora_name"))
            return answer
        self._say(name, "unloaded")
        answer.set_result(None)
        return answer

    def _needed(self, version: _Version) -> bool:
        return bool(version.users) or self._current.get(version.adapter.name) is version

    def _retire(self, version: _Version | None) -> None:
        """With the lock: the executor is to forget a version that nobody needs."""
        if version is None or self._needed(version):
            return
        self._versions.pop(version.key, None)
        with suppress(RuntimeError):  # nothing is read any more
            self._readers.submit(self._remove, version.key)

    def _remove(self, key: str) -> None:
        with self._lock, suppress(EngineError, UnsupportedError):
            if key not in self._versions:
                self._core.executor.remove_adapter(key)

    # Requests.

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand in requests, those that name an adapter once it is in memory.

        Raises what `EngineCore.submit` does, and NotFound. What goes wrong with an adapter's files
        ends its requests.
        """
        if all(request.adapter is None for request in requests):
            self._core.submit(*requests)
            return
        with self._lock:
            for request in requests:
                if request.adapter is not None and request.adapter not in self._current:
                    raise NotFound(f"there is no adapter {request.adapter!r} here", "model")
            pinned = [self._pinned(request) for request in requests]
        self._readers.submit(self._hand_in, pinned)

    def _pinned(self, request: Request) -> Request:
        """The request in the engine's words; its version stays until it ends."""
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
                log.exception("an adapter's requests could not be handed in")
            ends = [Finish(request.id, "error", None, error) for request in requests]
            self.finished(ends)
            self._tell(StepEvents(finished=ends))

    def _hold(self, version: _Version) -> None:
        """Have a version in host memory. Raises RequestError if its files cannot be read again."""
        executor = self._core.executor
        try:
            if version.held:
                with suppress(UnsupportedError):  # then the step reads what it needs
                    executor.prepare_adapter(version.key)
            else:
                executor.add_adapter(version.key, Path(version.adapter.path))
                version.held = True
        except CheckpointError as error:
            raise _unusable(version.adapter, error, "model") from error

    def finished(self, ends: Sequence[Finish]) -> None:
        """Requests have ended."""
        if self._using:
            for end in ends:
                self.forget(end.request)

    def forget(self, request: str) -> None:
        """A request has ended, or will not come."""
        with self._lock:
            version = self._using.pop(request, None)
            if version is not None:
                version.users.discard(request)
                self._retire(version)

    def sleep(self, level: int) -> None:
        """`EngineCore.sleep`; with the weights the executor's adapters are gone."""
        self._core.sleep(level)
        if level > 1:
            with self._lock:
                for version in self._versions.values():
                    version.held = False

    def close(self) -> None:
        """Read no more."""
        self._readers.shutdown(wait=False, cancel_futures=True)


def _unusable(adapter: Adapter, error: Exception, param: str) -> RequestError:
    """Names the adapter and what is wrong, and files without the folders that they are in."""
    told = str(error).replace(f"{adapter.path}/", "").replace(adapter.path, adapter.name)
    if isinstance(error, OSError) and error.strerror:
        told = f"its folder: {error.strerror}"
    return RequestError(f"adapter {adapter.name!r} cannot be loaded: {told}", param)


def _stamp(path: Path) -> str:
    """What changes when a file of the folder does, other for each of several in one. Raises
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
