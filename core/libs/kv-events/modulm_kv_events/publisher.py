"""Publishes batches of events over ZeroMQ in a thread of its own.

A message has three frames: the topic, the batch's number as 8 bytes in big-endian order, and
msgpack of [seconds since the epoch, [event, ...], replica]. Events are maps, or arrays (see
`events`). Numbers count up by one; a gap means
that the subscriber has missed batches. It may ask the replay endpoint for all batches from a number
on; the answers are pairs (number, batch), and the number -1 ends them. A socket of type REQ reads
the first answer only; DEALER, which puts an empty frame before each request, reads all. Source:
vLLM's documentation of its KV events subscriber.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from modulm.errors import ConfigError
from modulm_kv_events.events import as_map
from modulm_kv_events.flags import Settings

__all__ = ["Publisher"]

log = logging.getLogger("modulm.engine")

_END = b"\xff" * 8
#: Milliseconds that `close` waits for the last batches to be sent.
_LINGER = 200


class Publisher:
    """Numbers batches and publishes them.

    rank: the replica's number. Raises ConfigError if an endpoint cannot be used.
    """

    def __init__(self, settings: Settings, rank: int = 0) -> None:
        self._settings, self._rank = settings, rank
        self._topic = settings.topic.encode()
        self._lock = threading.Lock()
        self._queue: deque[tuple[int, float, Sequence[Any]]] = deque()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=settings.buffer_steps)
        self._number = 0
        self._dropping = self._closed = False
        self._context = zmq.Context()
        try:
            self._open(*settings.of_replica(rank))
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _open(self, endpoint: str, replay: str | None) -> None:
        self._bell, self._ear = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._ear.bind("inproc://bell")
        self._bell.connect("inproc://bell")
        self._events = self._context.socket(zmq.PUB)
        self._events.set_hwm(self._settings.hwm)
        self._attach(self._events, "endpoint", endpoint)
        self._replay = None if replay is None else self._context.socket(zmq.ROUTER)
        if self._replay is not None and replay is not None:
            self._replay.set_hwm(0)  # an answer has up to `buffer_steps` messages
            self._attach(self._replay, "replay_endpoint", replay, binds=True)

    def _attach(self, socket: Any, key: str, address: str, *, binds: bool = False) -> None:
        """Bind to wildcards and local names; connect to another host's address, as vLLM does."""
        binds = binds or "*" in address or "::" in address or not address.startswith("tcp:")
        try:
            (socket.bind if binds else socket.connect)(address)
        except zmq.ZMQError as error:
            raise ConfigError("kv_events_config", f"{key}: {address}: {error}") from error

    def publish(self, events: Sequence[Any]) -> None:
        """Queue a batch; never blocks. If too many are queued, the batch is dropped and its number
        skipped.
        """
        with self._lock:
            if self._closed:
                return
            number, self._number = self._number, self._number + 1
            if len(self._queue) >= self._settings.max_queue_size:
                if not self._dropping:
                    log.warning("KV events are dropped: %d batches wait", len(self._queue))
                self._dropping = True
                return
            self._dropping = False
            self._queue.append((number, time.time(), events))
            if len(self._queue) == 1:
                self._bell.send(b"")

    def close(self) -> None:
        """Send what is queued and close the sockets; may be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._bell.send(b"")
        self._thread.join()
        self._context.destroy(linger=_LINGER)

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._ear, self._replay):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._ear in ready:
                self._ear.recv()
            self._send()
            if self._replay in ready:
                self._answer()
            if self._closed:
                return

    def _send(self) -> None:
        while self._queue:
            with self._lock:
                number, seconds, events = self._queue.popleft()
            if self._settings.event_format == "map":
                events = [as_map(event) for event in events]
            batch = msgspec.msgpack.encode([seconds, events, self._rank])
            self._events.send_multipart([self._topic, number.to_bytes(8, "big"), batch])
            self._sent.append((number, batch))

    def _answer(self) -> None:
        """Send the kept batches from the requested number on."""
        if self._replay is None:
            return
        client, *request = self._replay.recv_multipart()
        if len(request) != 2 or len(request[1]) != 8:
            log.warning("a request to replay KV events is not a number of 8 bytes")
            return
        first = int.from_bytes(request[1], "big")
        for number, batch in self._sent:
            if number >= first:
                self._replay.send_multipart([client, b"", number.to_bytes(8, "big"), batch])
        self._replay.send_multipart([client, b"", _END, b""])
