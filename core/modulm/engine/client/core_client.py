"""The line between a front end and an engine, and the one to an engine in a thread.

An engine in a process of its own is reached by another line (`process.py`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from modulm.contracts.requests import Request, StepEvents
from modulm.engine.types.engine_info import EngineInfo, open_tokenizer
from modulm.errors import EngineDead

if TYPE_CHECKING:
    from modulm.config import EngineConfig
    from modulm.engine.core.engine_core import EngineCore
    from modulm.plugins.manager import PluginManager
    from modulm.text.tokenizer import Tokenizer

__all__ = ["EngineCoreClient", "ThreadCoreClient"]


class EngineCoreClient(ABC):
    """The line to an engine. What it tells arrives on any thread, through `events` and `died`."""

    info: EngineInfo
    #: Where further front ends of the same engine connect; None if they cannot.
    address: str | None = None
    #: Which of the engine's front ends this is.
    number: int = 0
    #: What this front end tells of itself when another one asks. Called on any thread.
    report: Callable[[], str] = staticmethod(lambda: "")

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Hand in requests, all or none. Raises QueueFull or EngineDead."""

    @abstractmethod
    def abort(self, request: str) -> None:
        """End a request; unknown ones are ignored."""

    @abstractmethod
    def call(self, name: str, *arguments: Any) -> Future[Any]:
        """A named operation of the engine between two steps ("reset_prefix_cache", ...)."""

    def reports(self) -> Future[list[str]]:
        """What the engine's other front ends tell of themselves, gone ones included."""
        answer: Future[list[str]] = Future()
        answer.set_result([])
        return answer

    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, for this side of the line."""
        return open_tokenizer(self.info.config, self.info.path)

    @abstractmethod
    def close(self) -> None:
        """Stop the engine, or leave it if others use it; may be called twice."""


class ThreadCoreClient(EngineCoreClient):
    """An engine in a thread of this process: it loads the model there and runs there."""

    def __init__(
        self,
        config: EngineConfig,
        plugins: PluginManager,
        events: Callable[[StepEvents], None],
        died: Callable[[EngineDead], None],
    ) -> None:
        self.events = events
        self.died = died
        ready: Future[EngineCore] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(config, plugins, ready), name="modulm-engine", daemon=True
        )
        self._thread.start()
        self._host = ready.result()
        self.info = self._host.info

    def _run(self, config: EngineConfig, plugins: PluginManager, ready: Future[EngineCore]) -> None:
        from modulm.engine.core.engine_core import EngineCore

        try:
            host = EngineCore(config, plugins, self, "server")
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(host)
        host.engine.run()
        host.stop()

    def submit(self, requests: Sequence[Request]) -> None:
        self._host.submit(*requests)

    def abort(self, request: str) -> None:
        self._host.engine.abort(request)

    def call(self, name: str, *arguments: Any) -> Future[Any]:
        return self._host.engine.call(self._host.operation(name, *arguments))

    def tokenizer(self) -> Tokenizer | None:
        return self._host.tokenizer

    def close(self) -> None:
        self._host.engine.stop()
        self._thread.join()
