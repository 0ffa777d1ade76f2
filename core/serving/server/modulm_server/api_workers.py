"""Several server processes on one socket, in front of one engine (`--api-server-count`).

The process that started serves as well; the others are told where the engine listens and take
connections from the same socket. One that dies is started again, unless that happens so often that
something must be wrong: then the service ends with an error. When the first one goes, so do its
engine and they.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

from modulm.config.environ import isolated
from modulm_server.output import forward

__all__ = ["Workers"]

log = logging.getLogger("modulm_server")

#: Seconds beyond --shutdown-timeout that a worker gets before it is killed.
_GRACE = 10.0
#: Deaths within this many seconds that are too many for each worker.
_WINDOW, _DEATHS = 60.0, 3


class Workers:
    """`count` more server processes; leaving the context ends them."""

    def __init__(self, count: int, sock: socket.socket, address: str, patience: float) -> None:
        self._patience = patience
        self._descriptor = sock.fileno()
        self._address = address
        self._deaths: list[float] = []
        self._ending: float | None = None
        self._processes = [self._started() for _ in range(count)]

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "modulm_server.api_worker"]
        process = subprocess.Popen(
            [*command, str(self._descriptor), self._address],
            pass_fds=(self._descriptor,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=isolated(),
        )
        if process.stdout is not None:
            forward(process.stdout)
        return process

    def look(self) -> bool:
        """Replace workers that have died. False if they die so often that it is no use."""
        if self._ending is not None:
            return True
        for place, process in enumerate(self._processes):
            code = process.poll()
            if code is None:
                continue
            now = time.monotonic()
            self._deaths = [death for death in self._deaths if death > now - _WINDOW] + [now]
            if len(self._deaths) > _DEATHS * len(self._processes):
                log.error("server processes die again and again, the last with code %d", code)
                return False
            log.error("server process %d ended with code %d: another one starts", process.pid, code)
            self._processes[place] = self._started()
        return True

    def end(self) -> None:
        """Tell all of them to finish what they do; may be called twice."""
        if self._ending is None:
            self._ending = time.monotonic()
            for process in self._processes:
                process.send_signal(signal.SIGTERM)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        latest = (self._ending or time.monotonic()) + self._patience + _GRACE
        for process in self._processes:
            try:
                process.wait(max(0.0, latest - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
