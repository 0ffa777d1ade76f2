"""The actor of a rank, which runs the same worker as the `mp` executor."""

from __future__ import annotations

import os
import platform
import socket
import threading
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from collections.abc import Mapping

    from modulm_distributed.stream import FrameStream

__all__ = ["Rank", "versions"]

#: Seconds a process may live on after its connection ended.
_LINGER = 5.0
#: Distributions whose versions must match on all machines.
_SAME = ("modulm", "modulm-distributed", "torch")


def versions() -> dict[str, str]:
    """Return the versions of distributions in this process, by name."""
    return {"Python": platform.python_version(), **{name: version(name) for name in _SAME}}


class Rank:
    """A rank: reports its location, then runs a worker."""

    def where(self) -> Mapping[str, Any]:
        """Return this rank's location: Ray's node id, address, process and versions."""
        context = ray.get_runtime_context()
        return {
            "node": context.get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "pid": os.getpid(),
            "versions": versions(),
        }

    def free_port(self, address: str) -> int:
        """Return a free port of this machine."""
        with socket.create_server((address, 0)) as server:
            port: int = server.getsockname()[1]
            return port

    def serve(self, address: str, secret: bytes, rank: int) -> None:
        """Run the worker of this rank until the connection to the executor ends.

        address: the path of a socket on this machine, or HOST:PORT of the executor. secret:
        authenticates both sides; sent through Ray.
        """
        from modulm_distributed.worker_process import serve

        serve(_connect(address, secret, rank))
        # The executor kills this process directly, unless its machine is unreachable.
        exit_timer = threading.Timer(_LINGER, os._exit, [0])
        exit_timer.daemon = True
        exit_timer.start()


def _connect(address: str, secret: bytes, rank: int) -> FrameStream:
    """Connect to the executor and announce the rank. Raises OSError."""
    from modulm_distributed.stream import FrameStream
    from modulm_distributed.tls import TlsSession, tls_contexts
    from modulm_wire import frames

    if address.startswith("/"):
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(address)
        stream = FrameStream(peer)
    else:
        session = TlsSession(tls_contexts(secret))  # takes time, for which no peer should wait
        host, _, port = address.rpartition(":")
        peer = socket.create_connection((host, int(port)))
        session.handshake(peer)
        stream, secret = FrameStream(peer, session), b""
    stream.send(frames.pack("rank", rank, secret))
    return stream
