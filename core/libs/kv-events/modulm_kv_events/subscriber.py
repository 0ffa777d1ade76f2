"""Follows the events of several engines in one thread, and repairs gaps by replays.

A source's batches are numbered from 0. A missing number starts a replay; live batches wait until it
has ended. What the replay does not bring, or not in time, is reported as lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
from attrs import define, field, frozen

from modulm_kv_events.events import as_array
from modulm_kv_events.settings import settings_of

__all__ = ["Source", "Subscriber", "source_of"]

log = logging.getLogger("modulm.engine")

_END = b"\xff" * 8
#: Seconds after which a replay that has not ended is given up.
_PATIENCE = 2.0


@frozen
class Source:
    """Where an engine publishes: ZeroMQ addresses to connect to, and the topic."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


def source_of(config: Any, host: str) -> Source | str | None:
    """Return the source of the engine with this configuration, which runs on `host`.

    None if it publishes nothing, and the reason if another process cannot subscribe to it.
    """
    settings = settings_of(config)
    if not settings.active:
        return None
    endpoint, replay = settings.of_replica(config.parallel.data_parallel_rank_local)
    # Anything else is connected to, not bound; see `Publisher._attach`.
    if endpoint.startswith("inproc:"):
        return f"{endpoint} is reached in the engine's process only"
    if endpoint.startswith("tcp:") and not ("*" in endpoint or "::" in endpoint):
        return f"{endpoint} is another router's; tcp://*:PORT lets several subscribe"
    if replay is not None and replay.startswith("inproc:"):
        replay = None
    repeated = None if replay is None else _reachable(replay, host)
    return Source(_reachable(endpoint, host), repeated, settings.topic)


def _reachable(endpoint: str, host: str) -> str:
    for wildcard in ("//*:", "//0.0.0.0:", "//[::]:"):
        endpoint = endpoint.replace(wildcard, f"//{host}:")
    return endpoint


@define(eq=False)
class _Stream:
    """The state of one source. following: number of the next batch; seconds: time of the last one.

    waiting: live batches during a replay, which ends at `deadline` (monotonic seconds). warned: the
    log says that its events are not understood.
    """

    events: Any
    replay: Any | None
    following: int = 0
    seconds: float = 0.0
    deadline: float | None = None
    waiting: deque[tuple[int, bytes]] = field(factory=deque)
    warned: bool = False


class Subscriber:
    """Reports the events of sources, each with a key.

    begin: gets a key before the first events of its source. apply: gets a key and the events of one
    batch as arrays; raises ValueError if it does not understand them. lost: gets a key whenever
    batches were missed for good, or a publisher began anew without its source being followed again.
    All run on the subscriber's thread.
    """

    def __init__(
        self,
        begin: Callable[[int], None],
        apply: Callable[[int, Sequence[Any]], None],
        lost: Callable[[int], None],
    ) -> None:
        self._begin, self._apply, self._lost = begin, apply, lost
        self._lock = threading.Lock()
        self._requests: deque[tuple[int, Source]] = deque()
        self._closed = False
        self._streams: dict[int, _Stream] = {}
        self._context = zmq.Context()
        self._bell, self._ear = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        try:
            self._ear.bind("inproc://bell")
            self._bell.connect("inproc://bell")
        except BaseException:
            self._context.destroy(linger=0)  # its end would wait for the sockets
            raise
        self._thread = threading.Thread(target=self._run, name="kv-subscriber", daemon=True)
        self._thread.start()

    def follow(self, key: int, source: Source) -> None:
        """Follow a source from its beginning, instead of the one that had this key."""
        with self._lock:
            if not self._closed:
                self._requests.append((key, source))
                self._bell.send(b"")

    def close(self) -> None:
        """Stop and close the sockets; may be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._bell.send(b"")
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._closed:
            for socket in self._wait():
                if socket is self._ear:
                    self._ear.recv()
            while self._requests:
                self._open(*self._requests.popleft())
            for key, stream in self._streams.items():
                self._read(key, stream)

    def _wait(self) -> Sequence[Any]:
        """Wait for messages or the end of a replay's time; return the sockets that have some."""
        poller = zmq.Poller()
        poller.register(self._ear, zmq.POLLIN)
        for stream in self._streams.values():
            poller.register(stream.events, zmq.POLLIN)
            if stream.replay is not None:
                poller.register(stream.replay, zmq.POLLIN)
        ends = [s.deadline for s in self._streams.values() if s.deadline is not None]
        left = max(min(ends) - time.monotonic(), 0.0) if ends else None
        return [socket for socket, _ in poller.poll(None if left is None else int(1000 * left) + 1)]

    def _open(self, key: int, source: Source) -> None:
        before = self._streams.pop(key, None)
        if before is not None:
            before.events.close(linger=0)
            if before.replay is not None:
                before.replay.close(linger=0)
        events = self._context.socket(zmq.SUB)
        events.setsockopt_string(zmq.SUBSCRIBE, source.topic)
        replay = None if source.replay_endpoint is None else self._context.socket(zmq.DEALER)
        self._streams[key] = stream = _Stream(events, replay)
        self._begin(key)
        try:
            events.connect(source.endpoint)
            if replay is not None and source.replay_endpoint is not None:
                replay.connect(source.replay_endpoint)
                self._ask(stream)
        except zmq.ZMQError as error:
            log.warning("KV events of %s are not followed: %s", source.endpoint, error)

    def _ask(self, stream: _Stream) -> None:
        """Ask for the batches from the next one on."""
        if stream.replay is not None:
            stream.replay.send_multipart([b"", stream.following.to_bytes(8, "big")])
            stream.deadline = time.monotonic() + _PATIENCE

    def _read(self, key: int, stream: _Stream) -> None:
        """Apply what a source has sent."""
        replay = stream.replay
        while replay is not None and replay.poll(0):
            frames = replay.recv_multipart()
            if stream.deadline is None or len(frames) != 3:
                continue  # of a replay that was given up
            if frames[1] == _END:
                self._resume(key, stream)
            else:
                self._use(key, stream, int.from_bytes(frames[1], "big"), frames[2])
        while stream.events.poll(0):
            frames = stream.events.recv_multipart()
            if len(frames) == 3:
                stream.waiting.append((int.from_bytes(frames[1], "big"), frames[2]))
        if stream.deadline is None or time.monotonic() > stream.deadline:
            self._resume(key, stream)

    def _resume(self, key: int, stream: _Stream) -> None:
        """Apply the waiting batches, up to a gap that a replay may fill."""
        replayed, stream.deadline = stream.deadline is not None, None
        while stream.waiting:
            number, _ = stream.waiting[0]
            if number > stream.following and stream.replay is not None and not replayed:
                self._ask(stream)
                return
            self._use(key, stream, *stream.waiting.popleft())
            replayed = False

    def _use(self, key: int, stream: _Stream, number: int, batch: bytes) -> None:
        """Apply a batch, unless it was before."""
        try:
            seconds, events, *_ = msgspec.msgpack.decode(batch)
            if number < stream.following and seconds <= stream.seconds:
                return  # it was in a replay, too
            if number != stream.following:
                self._lost(key)
            stream.following, stream.seconds = number + 1, seconds
            self._apply(key, [as_array(event) for event in events])
        except (ValueError, TypeError) as error:
            if not stream.warned:
                log.warning("KV events that are not understood are ignored: %s", error)
            stream.warned = True
            stream.following = number + 1
            self._lost(key)
