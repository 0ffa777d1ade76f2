"""The process of a rank on whatever machine Ray has put it: a worker like `mp`'s."""

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

__all__ = ["Rank", "connected", "versions"]

#: Seconds that a process without an executor lives on.
_LINGER = 5.0
#: What has to be the same wherever ranks of one model are.
_SAME = ("modulm", "modulm-distributed", "torch")


def versions() -> dict[str, str]:
    """What this process runs, by name."""
    return {"Python": platform.python_version(), **{name: version(name) for name in _SAME}}


class Rank:
    """A rank before it is one: says where it is, then does what its executor asks."""

    def where(self) -> Mapping[str, Any]:
        """The machine it is on: Ray's name of it, its address, and what runs there."""
        context = ray.get_runtime_context()
        return {
            "node": context.get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "pid": os.getpid(),
            "versions": versions(),
        }

    def free_port(self, address: str) -> int:
        """A port of this machine that nobody listens at."""
        with socket.create_server((address, 0)) as server:
            port: int = server.getsockname()[1]
            return port

    def serve(self, where: str, token: bytes, rank: int) -> None:
        """Be the worker of this rank until nobody asks any more. where: the path of a socket on
        this machine, or HOST:PORT.
        """
        from modulm_distributed.stream import FrameStream
        from modulm_distributed.worker_process import serve

        peer = connected(where)
        peer.sendall(token + rank.to_bytes(4, "big"))
        serve(FrameStream(peer))
        # Who asked ends this process at once, unless its machine is out of reach.
        last = threading.Timer(_LINGER, os._exit, [0])
        last.daemon = True
        last.start()


def connected(where: str) -> socket.socket:
    """A connection to the executor."""
    if where.startswith("/"):
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(where)
        return peer
    host, _, port = where.rpartition(":")
    return socket.create_connection((host, int(port)))
