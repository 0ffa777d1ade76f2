"""Frames over a stream socket, between an executor and a worker's process."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any

from modulm.engine.types import frames

__all__ = ["FrameStream"]

_PIECE = 1 << 16


class FrameStream:
    """A socket that frames go over. Any thread may send; one receives."""

    def __init__(self, peer: socket.socket) -> None:
        self._socket = peer
        self._lock = threading.Lock()
        self._data = bytearray()
        if peer.family != socket.AF_UNIX:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Send a packed frame. Raises OSError when the other side is gone."""
        with self._lock:
            self._socket.sendall(data)

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
