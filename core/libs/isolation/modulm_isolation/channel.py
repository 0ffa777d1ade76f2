"""Values over a socket: four bytes of length, then msgpack, as between front end and engine."""

from __future__ import annotations

import socket
import time
from typing import Any

from modulm_wire.packing import decode, encode

__all__ = ["LIMIT", "Channel", "Closed"]

#: Maximum size of a message in bytes, to limit what the receiver allocates.
LIMIT = 1 << 28


class Closed(Exception):
    """The other end has closed the connection."""


class Channel:
    """A connected socket. `send` and `receive` raise TimeoutError after a deadline, and Closed."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def send(self, value: Any, deadline: float | None = None) -> None:
        """Send a value. deadline: on `time.monotonic`. Raises TypeError for one that is not plain,
        before anything is sent.
        """
        body = encode(value)
        if len(body) > LIMIT:
            raise TypeError(f"a message has {len(body)} bytes, more than {LIMIT}")
        self._limit(deadline)
        try:
            self.socket.sendall(len(body).to_bytes(4, "big") + body)
        except TimeoutError:
            raise
        except OSError as error:
            raise Closed from error

    def receive(self, deadline: float | None = None) -> Any:
        """Receive a value; tuples are lists."""
        size = int.from_bytes(self._read(4, deadline), "big")
        if size > LIMIT:
            raise Closed
        return decode(self._read(size, deadline))

    def _read(self, size: int, deadline: float | None) -> bytearray:
        data = bytearray(size)
        view, position = memoryview(data), 0
        while position < size:
            self._limit(deadline)
            try:
                count = self.socket.recv_into(view[position:])
            except TimeoutError:
                raise
            except OSError as error:
                raise Closed from error
            if not count:
                raise Closed
            position += count
        return data

    def _limit(self, deadline: float | None) -> None:
        seconds = None if deadline is None else max(deadline - time.monotonic(), 1e-6)
        self.socket.settimeout(seconds)

    def close(self) -> None:
        self.socket.close()
