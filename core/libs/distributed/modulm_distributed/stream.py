"""Frames over a stream socket, between an executor and a worker's process."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from modulm.wire import frames

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FrameStream"]

_PIECE = 1 << 16
#: Seconds, and for the last one milliseconds, after which a machine that does not answer is gone.
_KEPT = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": 2000}
#: Most descriptors that come with a frame.
_MOST = 64


class FrameStream:
    """A socket that frames go over. Any thread may send; one receives."""

    def __init__(self, peer: socket.socket) -> None:
        self._socket = peer
        self._lock = threading.Lock()
        self._data = bytearray()
        #: Descriptors that have come with frames and were not taken yet.
        self.descriptors: list[int] = []
        #: Whether the other side is on this machine, so that descriptors can be sent to it.
        self.local = peer.family == socket.AF_UNIX
        if not self.local:
            _watched(peer)

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a packed frame, and copies of descriptors. Raises OSError when the other side is
        gone.
        """
        with self._lock:
            sent = socket.send_fds(self._socket, [data], descriptors) if descriptors else 0
            self._socket.sendall(memoryview(data)[sent:])

    def waiting(self) -> list[Any] | None:
        """A frame that has been received whole, if there is one."""
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
        """Take what has come, or wait for it; False at the end of the stream."""
        try:
            if self.local:
                piece, came, _, _ = socket.recv_fds(self._socket, _PIECE, _MOST)
                self.descriptors += came
            else:
                piece = self._socket.recv(_PIECE)
        except OSError:
            return False
        self._data += piece
        return bool(piece)

    def receive(self) -> list[Any] | None:
        """The next frame; None when there will be none."""
        while (frame := self.waiting()) is None:
            if not self.read():
                return None
        return frame

    def end(self) -> None:
        """Let both sides know that nothing will follow; who waits here is woken."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it, when nobody waits here any more."""
        self.end()
        self._socket.close()


def _watched(peer: socket.socket) -> None:
    """Send at once, and let the connection end when the other machine is gone."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEPT.items():
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
