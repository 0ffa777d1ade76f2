"""Frames over a stream socket, between an executor and a worker's process."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from modulm.errors import EngineError
from modulm_wire import frames

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modulm_distributed.tls import TlsSession

__all__ = ["FrameStream"]

_PIECE = 1 << 16
#: TCP options that detect a dead machine: in seconds, the last one in milliseconds.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": 2000}
#: Maximum descriptors of a frame.
_MAX_DESCRIPTORS = 64


class FrameStream:
    """Frames over a socket. Any thread may send; one receives.

    session: TLS session, if a TCP socket leads to another machine.
    """

    def __init__(self, peer: socket.socket, session: TlsSession | None = None) -> None:
        self._socket = peer
        self._session = session
        self._lock = threading.Lock()
        self._data = bytearray(b"" if session is None else session.open(b""))
        #: Descriptors received with frames, for the receiver to take.
        self.descriptors: list[int] = []
        #: Whether the other side is on this machine, so that descriptors can be sent to it.
        self.local = peer.family == socket.AF_UNIX
        if not self.local:
            if session is None:
                raise EngineError("a connection to another machine needs a TLS session")
            _detect_death(peer)

    def fileno(self) -> int:
        """Return the socket's descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a packed frame, and copies of descriptors. Raises OSError if the peer is gone."""
        with self._lock:
            if self._session is not None:
                data = self._session.seal(data)
            sent = socket.send_fds(self._socket, [data], descriptors) if descriptors else 0
            self._socket.sendall(memoryview(data)[sent:])

    def waiting(self) -> list[Any] | None:
        """Return the next complete frame that has been read; None if there is none."""
        if len(self._data) < 4:
            return None
        end = 4 + int.from_bytes(self._data[:4], "big")
        if end > frames.LIMIT:
            raise OSError("a frame is too long")
        if len(self._data) < end:
            return None
        body = self._data[4:end]
        del self._data[:end]
        return frames.unpack(body)

    def read(self) -> bool:
        """Read what has arrived, or wait for it; False at the end of the stream."""
        try:
            if self._session is None:
                piece, descriptors, _, _ = socket.recv_fds(self._socket, _PIECE, _MAX_DESCRIPTORS)
                self.descriptors += descriptors
                self._data += piece
            else:
                piece = self._socket.recv(_PIECE)
                self._data += self._session.open(piece)
        except OSError:
            return False
        return bool(piece)

    def receive(self) -> list[Any] | None:
        """Wait for the next frame; None at the end of the stream."""
        while (frame := self.waiting()) is None:
            if not self.read():
                return None
        return frame

    def end(self) -> None:
        """Shut the connection down for both sides; wakes a thread that waits in `read`."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. No other thread may be using the stream."""
        self.end()
        self._socket.close()


def _detect_death(peer: socket.socket) -> None:
    """Send small frames immediately, and end the connection when the other machine is gone."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
