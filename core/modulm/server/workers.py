"""Several server processes on one socket, in front of one engine (`--api-server-count`).

The process that started serves as well; the others are told where the engine listens and take
connections from the same socket. When one of them dies the rest goes on; when the first one goes,
so do its engine and they.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from types import TracebackType
from typing import Self

__all__ = ["Workers", "main"]

log = logging.getLogger("modulm.server")

#: Seconds beyond --shutdown-timeout that a worker gets before it is killed.
_GRACE = 10.0


class Workers:
    """`count` more server processes; leaving the context ends them."""

    def __init__(self, count: int, sock: socket.socket, address: str, patience: float) -> None:
        self._patience = patience
        descriptor = sock.fileno()
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "modulm.server.workers", str(descriptor), address],
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
            )
            for _ in range(count)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(self._patience + _GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main(descriptor: int, address: str) -> int:
    """A worker: serve what the socket brings, until told to stop or left by the engine."""
    from modulm.engine.aio import AsyncLLM
    from modulm.server.app import create_app
    from modulm.server.serve import make_server
    from modulm.server.talk import with_declared_parsers

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    engine = AsyncLLM.connect(address)
    config = with_declared_parsers(engine.info.config)
    served = create_app(engine, config)
    server = make_server(served, config.frontend)
    log.info("server process %d takes requests", os.getpid())
    try:
        server.run(sockets=[socket.socket(fileno=descriptor)])
        return 1 if engine.dead else 0
    finally:
        engine.shutdown()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
