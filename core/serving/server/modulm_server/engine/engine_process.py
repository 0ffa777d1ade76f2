"""The engine's process: serves front ends over sockets.

The process that starts the engine owns it through an inherited socket. Only the owner configures
it, and when the owner ends for any reason, so does the engine. Further front ends connect to a
second socket (`--api-server-count`, or over TLS from other machines). Steps run in the main thread
and another thread serves the sockets, so a step never waits for a front end.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from modulm.contracts.requests import Finish, StepEvents
from modulm.errors import EngineDead, EngineError, ModulmError, UnsupportedError
from modulm.plugins import manager
from modulm.plugins.calls import blame
from modulm.plugins.manager import PluginManager
from modulm_distributed.tls import TlsContexts, tls_contexts
from modulm_distributed.worker_calls import pack_answer
from modulm_fleet.secret import read_secret
from modulm_frontend.defaults import sampling_defaults
from modulm_frontend.profile import StepProfile
from modulm_isolation.process_state import watch_imports
from modulm_server.engine import codec
from modulm_server.engine.adapters import Adapter, AdapterRegistry
from modulm_server.engine.core_client import sleep, wake_up
from modulm_server.engine.heartbeat import StepWatch, stacks_file
from modulm_weight_transfer.engine import EngineWeights, WeightState
from modulm_wire import frames

if TYPE_CHECKING:
    from modulm.engine.core.engine_core import EngineCore

__all__ = ["main", "split"]

log = logging.getLogger("modulm.engine")

#: Maximum bytes queued for a front end that does not read, before it is disconnected.
_BACKLOG = 256 << 20
#: Bytes per read.
_PIECE = 1 << 16
#: Seconds to wait for reports of front ends; after that their previous reports count.
_REPORT_TIMEOUT = 2.0
#: Seconds in which front ends must read the last frames.
_GRACE = 5.0
#: Seconds between two checks whether an engine that is to be restarted is idle.
_IDLE_CHECK = 0.02
#: Seconds in which a front end on another machine must authenticate itself.
_HANDSHAKE = 10.0
#: Fields of StepEvents by request.
_TABLES = ("logprobs", "prompt_logprobs", "pooled", "drafted", "transfer_params", "retained")


class _FrontEnd(asyncio.BufferedProtocol):
    """A front end's connection to the engine's process.

    Reads into one reused buffer: asyncio would allocate 256 KiB per read, which fragments the heap.
    """

    def __init__(self, server: _SocketServer) -> None:
        self._server = server
        self._data = bytearray()
        self._transport: asyncio.Transport | None = None
        self.number = next(server.numbers)
        self.open: set[str] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._server.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._data += self._server.buffer[:nbytes]
        while len(self._data) >= 4:
            end = 4 + int.from_bytes(self._data[:4], "big")
            if end > frames.LIMIT:
                self.drop("a frame is too long")
            if len(self._data) < end or self._transport is None:
                return
            body = self._data[4:end]
            del self._data[:end]
            try:
                self._server.frame(self, frames.unpack(body))
            except Exception:
                log.exception("front end %d sent a frame that cannot be read", self.number)
                self.drop("a frame cannot be read")

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._server.disconnected(self)

    def send(self, data: bytes) -> None:
        if self._transport is None:
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > _BACKLOG:
            self.drop("it does not read what it is sent")

    def drop(self, reason: str) -> None:
        if self._transport is not None:
            log.error("front end %d is disconnected: %s", self.number, reason)
            self._transport.abort()
            self._transport = None


class _Reports:
    """Gathers the reports (metrics) of all front ends when one of them asks.

    The last reports of disconnected front ends are kept, so that their counts are not lost.
    """

    def __init__(self) -> None:
        self._latest: dict[int, str] = {}
        self._open: dict[int, tuple[_FrontEnd, int, set[int]]] = {}
        self._numbers = count()

    def gather(self, asker: _FrontEnd, number: int, peers: Iterable[_FrontEnd]) -> None:
        """Ask all other front ends; answers the asker's call `number` once they have reported."""
        others = [peer for peer in peers if peer is not asker]
        question = next(self._numbers)
        self._open[question] = (asker, number, {peer.number for peer in others})
        for peer in others:
            peer.send(frames.pack("tell", question))
        self._close(question)
        asyncio.get_running_loop().call_later(_REPORT_TIMEOUT, self._give_up, question)

    def receive_report(self, peer: _FrontEnd, question: int, text: str) -> None:
        """Store a front end's report."""
        self._latest[peer.number] = text
        if question in self._open:
            self._open[question][2].discard(peer.number)
            self._close(question)

    def disconnected(self, peer: _FrontEnd) -> None:
        """Wait no longer for a front end that has disconnected."""
        for question in list(self._open):
            self._open[question][2].discard(peer.number)
            self._close(question)

    def _give_up(self, question: int) -> None:
        if question in self._open:
            self._open[question][2].clear()
            self._close(question)

    def _close(self, question: int) -> None:
        asker, number, missing = self._open[question]
        if not missing:
            del self._open[question]
            reports = [text for peer, text in self._latest.items() if peer != asker.number]
            asker.send(frames.pack("answer", number, reports, None))


class _SocketServer:
    """Serves the sockets of an engine's process on a separate thread.

    owner: the inherited socket of the process that configures the engine. listener: for further
    front ends. tls: authenticates those of a TCP listener.
    """

    def __init__(
        self, owner: socket.socket, listener: socket.socket, tls: TlsContexts | None = None
    ) -> None:
        self.numbers = count()
        #: The last bytes read, from any front end. A view, since asyncio slices it for TLS, and
        #: slicing a bytearray copies.
        self.buffer = memoryview(bytearray(_PIECE))
        self.started: Future[list[Any]] = Future()
        self.owner_gone = threading.Event()
        self._listener, self._tls = listener, tls
        self.address: str | tuple[Any, ...] = listener.getsockname()
        self._loop = asyncio.new_event_loop()
        self._owner = _FrontEnd(self)
        self._peers: dict[int, _FrontEnd] = {}
        self._requests: dict[str, _FrontEnd] = {}
        self._hello: bytes | None = None
        self._reports = _Reports()
        self._core: EngineCore | None = None
        self._registry: AdapterRegistry | None = None
        self._profile: StepProfile | None = None
        self._weights: EngineWeights | None = None
        self._thread = threading.Thread(
            target=self._run, args=(owner,), name="modulm-sockets", daemon=True
        )
        self._thread.start()

    def _run(self, owner: socket.socket) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve(owner))
        except (Exception, asyncio.CancelledError) as error:  # nobody could end the engine
            log.exception("the engine's sockets cannot be served")
            owner.close()
            self.started.set_exception(EngineDead(f"its sockets cannot be served: {error}"))
            return
        self._loop.run_forever()

    async def _serve(self, owner: socket.socket) -> None:
        loop, listener = self._loop, self._listener
        await loop.create_unix_connection(lambda: self._owner, sock=owner)
        if self._tls is None:
            await loop.create_unix_server(lambda: _FrontEnd(self), sock=listener)
        else:
            await loop.create_server(
                lambda: _FrontEnd(self),
                sock=listener,
                ssl=self._tls.server,
                ssl_handshake_timeout=_HANDSHAKE,
            )

    def end(self) -> None:
        """Stop serving and disconnect all front ends."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for peer in self._peers.values():
            peer.drop("the engine has ended")
        self._loop.close()

    # From the engine's thread.

    def ready(self, core: EngineCore) -> None:
        """Accept requests for the engine from now on."""
        self._registry = AdapterRegistry(
            core, partial(self._later, self._deliver), partial(self._later, self._adapters_changed)
        )
        self._weights = EngineWeights(core, partial(self._later, self._weights_changed))
        self._loop.call_soon_threadsafe(self._open, core)

    def refuse(self, error: BaseException) -> None:
        """Send front ends the error with which the engine failed to start."""
        self._later(self._greet_all, frames.pack("error", frames.pack_error(error)))

    def events(self, events: StepEvents) -> None:
        """Handle a finished step (see `loop.Listener`)."""
        if events.finished and self._registry is not None:
            self._registry.release(events.finished)
        self._later(self._deliver, events)

    def died(self, error: EngineDead) -> None:
        """Tell front ends that the engine has died."""
        self._later(self._broadcast, frames.pack("dead", str(error)))

    def flush(self) -> None:
        """Wait briefly until queued frames have been sent."""
        done = asyncio.run_coroutine_threadsafe(self._flushed(), self._loop)
        with suppress(TimeoutError):
            done.result(_GRACE)

    def _later(self, function: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    async def _flushed(self) -> None:
        await asyncio.sleep(0.05)

    # On the sockets' thread.

    def frame(self, peer: _FrontEnd, frame: list[Any]) -> None:
        kind, *arguments = frame
        if kind == "start":
            if peer is not self._owner or self.started.done():
                peer.drop("only the process that started the engine says what it runs")
                return
            self.started.set_result(arguments)
        elif kind == "hello":
            self._peers[peer.number] = peer
            if self._hello is not None:
                peer.send(self._hello)
            elif self._core is not None:
                self._greet(peer)
        elif self._core is not None:
            self._request(self._core, peer, kind, arguments)

    @property
    def adapters(self) -> AdapterRegistry:
        """The adapters. Raises EngineError before the engine has started."""
        if self._registry is None:
            raise EngineError("there is no engine yet")
        return self._registry

    @property
    def weights(self) -> EngineWeights:
        """The weights. Raises EngineError before the engine has started."""
        if self._weights is None:
            raise EngineError("there is no engine yet")
        return self._weights

    def _request(self, core: EngineCore, peer: _FrontEnd, kind: str, arguments: list[Any]) -> None:
        if kind == "submit":
            self._submit(peer, arguments[0])
        elif kind == "abort":
            if arguments[0] in peer.open:
                self._forget(arguments[0])
                self._abort(core, arguments[0])
        elif kind == "adapters":
            peer.send(frames.pack("answer", arguments[0], None, None))
        elif kind == "gather":
            self._reports.gather(peer, arguments[0], self._peers.values())
        elif kind == "retire" and peer is self._owner:
            self._broadcast(frames.pack("retiring"))
            self._answer_when_idle(peer, arguments[0])
        elif kind == "told":
            self._reports.receive_report(peer, *arguments)
        else:
            self._operate(core, peer, kind, *arguments)

    def _answer_when_idle(self, peer: _FrontEnd, number: int) -> None:
        """Answer a call once all requests have ended."""
        if self._requests:
            self._loop.call_later(_IDLE_CHECK, self._answer_when_idle, peer, number)
        else:
            peer.send(frames.pack("answer", number, None, None))

    def _abort(self, core: EngineCore, request: str) -> None:
        self.adapters.forget(request)
        core.loop.abort(request)

    def _submit(self, peer: _FrontEnd, tables: list[dict[str, Any]]) -> None:
        """Submit requests. An error ends these requests, not their front end."""
        try:
            requests = [codec.unpack_request(table) for table in tables]
            for request in requests:
                if request.id in self._requests:
                    raise EngineError(f"request id {request.id!r} is in use")
            self.adapters.submit(requests)
        except Exception as error:
            refused = [Finish(table["id"], "error", None, error) for table in tables]
            peer.send(frames.pack("events", codec.pack_events(StepEvents(finished=refused))))
            return
        for request in requests:
            self._requests[request.id] = peer
            peer.open.add(request.id)

    def _operate(
        self, core: EngineCore, peer: _FrontEnd, kind: str, number: int, *arguments: Any
    ) -> None:
        """Run an operation, between two steps if needed, and send its result."""

        def answered(future: Future[Any]) -> None:
            error = future.exception()
            value = None if error else future.result()
            self._later(peer.send, pack_answer(number, value, error))

        operations: dict[str, Callable[..., Any]] = {
            "reset_prefix_cache": core.reset_prefix_cache,
            "sleep": partial(sleep, self.adapters, self.weights),
            "wake_up": partial(wake_up, core, self.weights),
            "weights": self.weights.run,
            "is_sleeping": core.is_sleeping,
            "start_profile": lambda: self._profiled(core).start(),
            "stop_profile": lambda: self._profiled(core).stop(),
            "call_workers": core.executor.call,
        }
        try:
            if kind == "call_workers" and ":" in arguments[0] and peer is not self._owner:
                raise UnsupportedError("only the process that started the engine may import")
            if kind == "load_adapter":
                future: Future[Any] = self.adapters.load(Adapter(*arguments[0]), arguments[1])
            elif kind == "unload_adapter":
                future = self.adapters.unload(arguments[0])
            else:
                future = core.loop.call(partial(operations[kind], *arguments))
            future.add_done_callback(answered)
        except ModulmError as error:
            peer.send(frames.pack("answer", number, None, frames.pack_error(error)))

    def _profiled(self, core: EngineCore) -> StepProfile:
        """The engine's profiler, created on first use."""
        if self._profile is None:
            self._profile = StepProfile(core)
        return self._profile

    def disconnected(self, peer: _FrontEnd) -> None:
        """Cancel a front end's requests; if it was the owner, end the engine."""
        self._peers.pop(peer.number, None)
        self._reports.disconnected(peer)
        for identity in peer.open:
            self._requests.pop(identity, None)
            if self._core is not None:
                self._abort(self._core, identity)
        peer.open.clear()
        if peer is self._owner:
            self.owner_gone.set()
            if self._core is not None:
                self._core.loop.stop()
                self._loop.call_later(_GRACE, self.leave)
            elif self.started.done():  # the model is still loading
                self.leave()
            else:
                self.started.set_exception(EngineDead("the process that started it has ended"))

    def leave(self) -> None:
        """End the process immediately, even during a step, because its owner is gone."""
        self.remove_folder()
        os._exit(1)

    def remove_folder(self) -> None:
        """Remove the socket's folder, since the owner is gone and cannot."""
        if self.owner_gone.is_set() and isinstance(self.address, str):
            shutil.rmtree(Path(self.address).parent, ignore_errors=True)

    def _open(self, core: EngineCore) -> None:
        self._core = core
        for peer in self._peers.values():
            self._greet(peer)
        self._beat(StepWatch.of(core))
        if self.owner_gone.is_set():
            core.loop.stop()

    def _beat(self, watch: StepWatch) -> None:
        """Send front ends a heartbeat, with the reason if a step has stalled."""
        self._broadcast(frames.pack("beat", watch.look()))
        if watch.timeout:
            self._loop.call_later(watch.interval, self._beat, watch)

    def _greet(self, peer: _FrontEnd) -> None:
        if self._core is not None:
            adapters = list(map(attrs.astuple, self.adapters.adapters))
            info, state = codec.pack_info(self._core.info), attrs.asdict(self.weights.state)
            peer.send(frames.pack("info", peer.number, info, adapters, state))

    def _adapters_changed(self, adapters: tuple[Adapter, ...]) -> None:
        self._broadcast(frames.pack("adapters", list(map(attrs.astuple, adapters))))

    def _weights_changed(self, state: WeightState) -> None:
        self._broadcast(frames.pack("weights", attrs.asdict(state)))

    def _greet_all(self, data: bytes) -> None:
        self._hello = data
        self._broadcast(data)

    def _broadcast(self, data: bytes) -> None:
        for peer in self._peers.values():
            peer.send(data)

    def _deliver(self, events: StepEvents) -> None:
        """Send each front end the events of its requests, and the step's statistics."""
        if len(self._peers) == 1:
            for peer in self._peers.values():
                peer.send(frames.pack("events", codec.pack_events(events)))
        else:
            for peer, part in split(events, self._requests, self._peers.values()):
                peer.send(frames.pack("events", codec.pack_events(part)))
        for finish in events.finished:
            self._forget(finish.request)

    def _forget(self, identity: str) -> None:
        peer = self._requests.pop(identity, None)
        if peer is not None:
            peer.open.discard(identity)


def split(events: StepEvents, owners: dict[str, Any], peers: Any) -> list[tuple[Any, StepEvents]]:
    """The events of each peer; `owners`: request -> peer."""
    shared = partial(StepEvents, events.time, stats=events.stats, counts=events.counts)
    parts = {id(peer): (peer, shared()) for peer in peers}
    for identity, token in zip(events.requests, events.tokens, strict=True):
        part = parts.get(id(owners.get(identity)))
        if part is not None:
            part[1].requests.append(identity)
            part[1].tokens.append(token)
    for start in events.started:
        if id(owners.get(start.request)) in parts:
            parts[id(owners[start.request])][1].started.append(start)
    for finish in events.finished:
        if id(owners.get(finish.request)) in parts:
            parts[id(owners[finish.request])][1].finished.append(finish)
    for table in _TABLES:
        _split_table(table, events, owners, parts)
    return list(parts.values())


def _split_table(table: str, events: StepEvents, owners: dict[str, Any], parts: Any) -> None:
    for identity, value in getattr(events, table).items():
        if id(owners.get(identity)) in parts:
            getattr(parts[id(owners[identity])][1], table)[identity] = value


def main(owner: str, listener: str, secret_file: str = "", loads: str = "") -> int:
    """The main function of the process: wait for the configuration, run the engine, end with the
    owner.

    owner, listener: descriptors of the two sockets. secret_file: the secret that front ends must
    know, for a TCP listener. loads: "loads-model" if the model will run in this process.
    """
    for number in (signal.SIGINT, signal.SIGHUP):  # of the terminal, for the owner
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    watch_imports()
    listening = socket.socket(fileno=int(listener))
    tls = None
    if listening.family != socket.AF_UNIX:
        if not secret_file:
            raise EngineError("an engine on TCP requires a secret")
        tls = tls_contexts(read_secret(secret_file))
    server = _SocketServer(socket.socket(fileno=int(owner)), listening, tls)
    try:
        return _run(server, loads == "loads-model")
    finally:
        server.remove_folder()


def _run(server: _SocketServer, loads_model: bool) -> int:
    """Run the engine; returns the exit code."""
    from modulm.engine.core.engine_core import EngineCore

    if loads_model:
        # Importing torch takes most of a start; meanwhile the front end reads its configuration.
        import modulm.engine.worker.worker  # noqa: F401

    gc.enable()
    gc.freeze()  # what was imported stays
    try:
        flags, plugins = server.started.result()
    except BaseException:
        return 0
    try:
        with manager.using(PluginManager.replay(frames.unpack_plugins(plugins))) as here:
            config = frames.unpack_config(flags)
            faulthandler.register(signal.SIGUSR1, stacks_file(config), all_threads=True)
            core = EngineCore(config, here, server, "server", sampling_defaults)
            server.ready(core)
            core.loop.run()
            core.stop()
    except (Exception, SystemExit) as error:
        reported = error
        if not isinstance(error, ModulmError):
            reported = blame(error, PluginManager().everything()) or error
            log.error("the engine did not start: %s", reported)
        server.refuse(reported)
        server.flush()
        return 1
    server.flush()
    return 0 if core.loop.dead is None else 1
