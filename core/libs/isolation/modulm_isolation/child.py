"""The program of an isolated package's process.

It receives its confinement, confines itself, and then answers calls one after the other. Classes
that serve the calls are of this project; they import the plugin.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from modulm.errors import ModulmError
from modulm_isolation.channel import Channel, Closed
from modulm_isolation.sandbox import confine

__all__ = ["Questions", "main", "resolve"]


class Questions:
    """Asks the process that started this one, during a call.

    requests: a socket of packets, each with the descriptor of a new connection from there.
    """

    def __init__(self, channel: Channel, requests: socket.socket) -> None:
        self._channel = channel
        self.requests = requests

    def ask(self, method: str, *arguments: Any) -> Any:
        """Ask and wait. Raises what the answer raised."""
        from modulm_wire.frames import unpack_error

        self._channel.send(["ask", method, arguments])
        kind, value = self._channel.receive()
        if kind == "answer":
            return value
        error = unpack_error(value)
        raise error if error is not None else RuntimeError(method)


def resolve(target: str) -> Any:
    """Import "package.module:attribute" or "package.module"."""
    module, _, path = target.partition(":")
    found: Any = import_module(module)
    for name in path.split(".") if path else ():
        found = getattr(found, name)
    return found


def main(descriptor: int, requests: int) -> None:
    """Serve the connection until it is closed."""
    os.dup2(2, 1)  # standard output belongs to the process that started this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the starter ends this one
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        setup = channel.receive()
        sys.path[:] = setup["path"]
        for module in setup["imports"]:
            import_module(module)
        memory, network, subprocesses, folders = setup["confinement"]
        channel.send(confine(memory, network, subprocesses, folders))
        threading.Thread(target=_end_with, args=(channel.socket,), daemon=True).start()
        _serve(channel, Questions(channel, socket.socket(fileno=requests)))
    except Closed:
        return


def _end_with(connection: socket.socket) -> None:
    """End this process when the other end is gone, also while a plugin hangs."""
    gone = select.poll()
    gone.register(connection, select.POLLRDHUP)
    gone.poll()
    os.killpg(0, signal.SIGKILL)


def _serve(channel: Channel, questions: Questions) -> None:
    servers: dict[str, Any] = {}
    while True:
        name, method, arguments, forgotten = channel.receive()
        answer: Sequence[Any]
        try:
            server = servers.get(name)
            if server is None:
                server = servers[name] = resolve(name)(questions)
            for each in servers.values():
                each.forget(forgotten)
            if method == "prepare":
                resolve(*arguments)
                answer = ["done", None]
            else:
                answer = ["done", getattr(server, method)(*arguments)]
        except ModulmError as error:
            answer = _refusal(error)
        except (Exception, SystemExit) as error:
            answer = ["raised", f"{type(error).__name__}: {error}"]
        try:
            channel.send(answer)
        except TypeError as error:
            channel.send(["raised", f"TypeError: {error}"])


def _refusal(error: ModulmError) -> Sequence[Any]:
    from modulm_wire.frames import pack_error

    return ["refused", pack_error(error)]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)
