"""Sockets of engines, ranks and front ends that fail, and shortages of the machine."""

from __future__ import annotations

import errno
import os
import socket
import threading
from typing import Any

import pytest

from modulm_distributed import accepting
from modulm_distributed.accepting import accepted
from modulm_distributed.stream import FrameStream
from modulm_wire import frames

#: Shortages, then peers that went away.
ERRORS = (
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EIO, errno.EPERM,
    errno.ECONNABORTED, errno.ECONNRESET, errno.EINTR,
)  # fmt: skip


class Listener(socket.socket):
    """Fails once with each error before it accepts a connection."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.errors = list(ERRORS)

    def accept(self) -> Any:
        if self.errors:
            code = self.errors.pop(0)
            raise OSError(code, os.strerror(code))
        return super().accept()


def test_no_shortage_ends_a_listener(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accepting, "_PAUSE", 0.0)
    closed = threading.Event()
    with Listener(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(4)
        connections = accepted(listener, closed)
        for _ in range(2):
            with socket.create_connection(listener.getsockname()), next(connections) as peer:
                assert peer.fileno() >= 0
            listener.errors = list(ERRORS)
        assert [record.getMessage() for record in caplog.records] == [
            f"connections wait: {os.strerror(errno.EMFILE)}"
        ] * 2
        listener.errors = []
        listener.shutdown(socket.SHUT_RDWR)
        assert list(connections) == []
    assert list(accepted(listener, closed)) == []
    closed.set()
    assert list(accepted(Listener(), closed)) == []


def pair() -> tuple[FrameStream, FrameStream]:
    ours, theirs = socket.socketpair()
    return FrameStream(ours), FrameStream(theirs)


def test_short_reads_and_writes_between_engine_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte at a time is read, and the first write takes one byte and the descriptors."""
    read, write = socket.recv_fds, socket.send_fds
    monkeypatch.setattr(socket, "recv_fds", lambda peer, _, most: read(peer, 1, most))
    monkeypatch.setattr(socket, "send_fds", lambda peer, data, fds: write(peer, [data[0][:1]], fds))
    one, other = pair()
    reader, writer = os.pipe()
    one.send(frames.pack("run", b"a plan" * 9), [writer])
    one.send(frames.pack("next"))
    os.close(writer)
    assert other.receive() == ["run", b"a plan" * 9]
    assert other.receive() == ["next"]
    (copy,) = other.descriptors
    os.write(copy, b"same pipe")
    assert os.read(reader, 9) == b"same pipe"
    for descriptor in (copy, reader):
        os.close(descriptor)
    one.close()
    assert other.receive() is None
    other.close()


@pytest.mark.parametrize("code", [errno.ECONNRESET, errno.EIO, errno.ETIMEDOUT, errno.EMFILE])
def test_a_broken_connection_of_a_rank_is_its_end(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor then says how the rank's process ended; half a frame is no frame."""

    def fail(*_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    one, other = pair()
    data = frames.pack("result", b"x" * 40)
    one._socket.sendall(data[:20])
    assert other.read()
    monkeypatch.setattr(socket, "recv_fds", fail)
    assert other.receive() is None
    other.close()
    with pytest.raises(OSError, match="Broken pipe"):
        one.send(data)
    one.close()
