"""The client of an engine in another process: requests out, events in.

owner                              engine process (`engine_process.py`)
EngineProcess(config)  --start-->  loads the model
                       <--info---  (or error)
ProcessCoreClient      --submit, abort, sleep ...-->
                       <--events, answer, dead------
                       <--tell (told, gather)-------
                       <--adapters------------------
                       <--beat----------------------
                       <--retiring------------------
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import attrs

from modulm.contracts.requests import Request, StepEvents
from modulm.errors import EngineDead, EngineError, UnsupportedError
from modulm_distributed.worker_calls import function_name, pack_call
from modulm_server.engine import codec
from modulm_server.engine.adapters import Adapter
from modulm_server.engine.core_client import EngineCoreClient, WorkerCall
from modulm_server.engine.early_tokenizer import EarlyTokenizer
from modulm_server.engine.spawn import EngineProcess, connect
from modulm_server.flags import ServerConfig
from modulm_weight_transfer.engine import WeightState
from modulm_wire import frames

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.plugins.manager import PluginManager

__all__ = ["ProcessCoreClient"]

log = logging.getLogger("modulm_server")


class ProcessCoreClient(EngineCoreClient):
    """Reaches an engine core in another process over its socket, and waits until the model is
    loaded.

    owned: the process, if this front end started it. secret_file: for an engine that is reached
    over TCP. Raises the error with which the engine failed to start.
    """

    def __init__(
        self,
        address: str,
        events: Callable[[StepEvents], None],
        died: Callable[[EngineDead], None],
        owned: EngineProcess | None = None,
        secret_file: str | None = None,
    ) -> None:
        self.address = address
        self._events = events
        self._died = died
        self._owned = owned
        self._calls: dict[int, Future[Any]] = {}
        self._death: EngineDead | None = None
        self._numbers = count()
        #: Called when the engine is about to be restarted and should get no more requests.
        self.retiring: Callable[[], None] = lambda: None
        self._closing = False
        self._lock = threading.Lock()
        self._unsent: SimpleQueue[bytes | None] = SimpleQueue()
        self._behind = 0
        self._sender: threading.Thread | None = None
        self._heard = time.monotonic()
        self._stuck: str | None = None
        self._connection = owned.connection if owned else connect(address, secret_file)
        self._peer = self._connection.socket
        self._stream = self._connection.reader()
        self._send(frames.pack("hello"))
        frame = self._receive()
        if frame is None:
            self.close()
            raise EngineDead(owned.ending() if owned else "the engine's process is gone")
        if frame[0] == "error":
            self.close()
            raise frames.unpack_error(frame[1]) or EngineDead("the engine did not start")
        self.number, self.info = frame[1], codec.unpack_info(frame[2])
        self._adapters_changed(frame[3])
        self.weights = WeightState(**frame[4])
        self._timeout = self.info.config.group(ServerConfig).engine_heartbeat_timeout
        self._thread = threading.Thread(target=self._listen, name="modulm-events", daemon=True)
        self._thread.start()

    @classmethod
    def of(
        cls,
        process: EngineProcess,
        config: EngineConfig,
        plugins: PluginManager,
        events: Callable[[StepEvents], None],
        died: Callable[[EngineDead], None],
    ) -> ProcessCoreClient:
        """Reach a process that loads a model; meanwhile, open its tokenizer."""
        early = EarlyTokenizer.of(config, plugins)
        client = cls(process.address, events, died, process)
        client.early = early
        return client

    @property
    def process_ids(self) -> tuple[int, ...]:
        return () if self._owned is None else (self._owned.pid,)

    def submit(self, requests: Sequence[Request]) -> None:
        self._send(frames.pack("submit", [codec.pack_request(request) for request in requests]))

    def abort(self, request: str) -> None:
        with suppress(EngineDead):
            self._send(frames.pack("abort", request))

    def refresh_adapters(self) -> Future[None]:
        return self._call("adapters")  # changes are sent before the answer

    def load_adapter(self, adapter: Adapter, replace: bool) -> Future[None]:
        return self._call("load_adapter", list(attrs.astuple(adapter)), replace)

    def unload_adapter(self, name: str) -> Future[None]:
        return self._call("unload_adapter", name)

    def _adapters_changed(self, adapters: list[list[Any]]) -> None:
        self.adapters = {fields[0]: Adapter(*fields) for fields in adapters}

    def reset_prefix_cache(self) -> Future[None]:
        return self._call("reset_prefix_cache")

    def sleep(self, level: int) -> Future[None]:
        return self._call("sleep", level)

    def wake_up(self) -> Future[None]:
        return self._call("wake_up")

    def is_sleeping(self) -> Future[bool]:
        return self._call("is_sleeping")

    def start_profile(self) -> Future[None]:
        return self._call("start_profile")

    def stop_profile(self) -> Future[None]:
        return self._call("stop_profile")

    def check_call(self, call: WorkerCall) -> None:
        """Raise UnsupportedError for a function, if another process has started the engine."""
        if self._owned is None and not isinstance(call.function, str):
            raise UnsupportedError(
                "only the process that started the engine can call a function of its own: register "
                "it in the entry-point group modulm.worker_functions and pass its name"
            )

    def call_workers(self, call: WorkerCall) -> Future[list[Any]]:
        self.check_call(call)
        name = function_name(call.function)
        return self._ask(
            lambda number: pack_call(
                "call_workers", number, name, call.args, call.kwargs, call.timeout
            )
        )

    def retire(self) -> Future[None]:
        """Tell all front ends to send no more requests; done when no request is left."""
        return self._call("retire")

    def run_weights(self, operation: str, arguments: Mapping[str, Any]) -> Future[dict[str, Any]]:
        return self._call("weights", operation, dict(arguments))

    def reports(self) -> Future[list[str]]:
        return self._call("gather")

    def trouble(self) -> str | None:
        silence = time.monotonic() - self._heard
        if self._timeout and silence > self._timeout:
            return f"nothing was heard of its process for {silence:.0f} s"
        return self._stuck

    def forget_silence(self) -> None:
        self._heard = time.monotonic()

    def dump_stacks(self) -> None:
        if self._owned is not None:
            self._owned.dump_stacks()

    def give_up(self, error: EngineError) -> None:
        for number in list(self._calls):
            answer = self._calls.pop(number, None)
            if answer is not None:
                answer.set_exception(error)

    def kill(self) -> bool:
        if self._owned is not None:
            self._owned.kill()
        return self._owned is not None

    def close(self) -> None:
        self._closing = True
        self._unsent.put(None)
        with suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)
        self._peer.close()
        self._stream.close()
        if self._owned is not None:
            self._owned.close()

    def _call(self, operation: str, *arguments: Any) -> Future[Any]:
        """Call an operation; the future gets the frame with the call's number."""
        return self._ask(lambda number: frames.pack(operation, number, *arguments))

    def _ask(self, pack: Callable[[int], bytes]) -> Future[Any]:
        """Send a frame that is packed with its number; returns a future for the answer."""
        number, answer = next(self._numbers), Future[Any]()
        answer.set_running_or_notify_cancel()  # cannot be cancelled: the answer comes anyway
        data = pack(number)
        self._calls[number] = answer
        self._send(data)
        if self._death is not None:  # the send may not have failed
            self.give_up(self._death)
        return answer

    def _send(self, data: bytes) -> None:
        """Send without blocking. If the engine does not read, a thread sends the rest."""
        with self._lock:
            data = self._connection.seal(data)
            sent = 0
            if not self._behind:
                try:
                    sent = self._peer.send(data, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass
                except OSError as error:
                    raise EngineDead("the engine's process is gone") from error
            if sent < len(data):
                self._behind += 1
                self._unsent.put(data[sent:])
                if self._sender is None:
                    self._sender = threading.Thread(
                        target=self._send_rest, name="modulm-rest", daemon=True
                    )
                    self._sender.start()

    def _send_rest(self) -> None:
        with suppress(OSError):
            while (data := self._unsent.get()) is not None:
                self._peer.sendall(data)
                with self._lock:
                    self._behind -= 1

    def _receive(self) -> list[Any] | None:
        """The next frame; None at the end of the connection."""
        try:
            size = int.from_bytes(self._stream.read(4), "big")
            body = self._stream.read(size)
        except (OSError, ValueError):
            return None
        return frames.unpack(body) if size and len(body) == size else None

    def _listen(self) -> None:
        """Handle frames until the connection ends; the body of the receiving thread."""
        death: EngineDead | None = None
        try:
            while death is None and (frame := self._receive()) is not None:
                self._heard = time.monotonic()
                death = self._handle(frame)
        except Exception as error:
            log.exception("a frame from the engine's process cannot be read")
            death = EngineDead(f"the engine's process sent what cannot be read: {error}")
        if death is None:
            ending = self._owned.ending() if self._owned and not self._closing else ""
            death = EngineDead(ending or "the connection to the engine was closed")
        self._death = death
        self.give_up(death)
        self._died(death)

    def _handle(self, frame: list[Any]) -> EngineDead | None:
        """Handle a frame. Returns an error if no more will follow."""
        if frame[0] == "beat":
            self._stuck = frame[1]
        elif frame[0] == "events":
            self._events(codec.unpack_events(frame[1]))
        elif frame[0] == "answer":
            self._answer(*frame[1:])
        elif frame[0] == "adapters":
            self._adapters_changed(frame[1])
        elif frame[0] == "weights":
            self.weights = WeightState(**frame[1])
            self.weights_changed()
        elif frame[0] == "retiring":
            self.retiring()
        elif frame[0] == "tell":
            with suppress(EngineDead):
                self._send(frames.pack("told", frame[1], self.report()))
        elif frame[0] == "dead":
            return EngineDead(frame[1])
        return None

    def _answer(self, number: int, value: Any, error: list[Any] | None) -> None:
        answer = self._calls.pop(number, None)
        if answer is None:
            return
        failed = frames.unpack_error(error)
        if failed is None:
            answer.set_result(value)
        else:
            answer.set_exception(failed)
