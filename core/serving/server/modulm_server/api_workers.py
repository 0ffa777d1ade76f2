"""Several server processes on one socket, in front of one engine (`--api-server-count`).

The first process serves too. The others connect to its engine and accept connections from the same
socket. A process that dies is restarted; if they die too often, the service ends with an error.
When the first process ends, so do its engine and the other processes.
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
from modulm.errors import EngineError
from modulm_server.output import forward

__all__ = ["Workers"]

log = logging.getLogger("modulm_server")

#: Seconds beyond --shutdown-timeout that a worker gets before it is killed.
_GRACE = 10.0
#: A window in seconds, and the deaths per worker within it that are too many.
_WINDOW, _DEATHS = 60.0, 3


class Workers:
    """`count` additional server processes, which end with the context.

    Raises EngineError if the machine has no room for them.
    """

    def __init__(self, count: int, sock: socket.socket, address: str, patience: float) -> None:
        self._patience = patience
        self._descriptor = sock.fileno()
        self._address = address
        self._deaths: list[float] = []
        self._ending: float | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(count):
                self._processes.append(self._start())
        except OSError as error:
            self._kill()
            raise EngineError(
                f"only {len(self._processes)} of {count} further server processes can be started "
                f"({error.strerror}): lower --api-server-count"
            ) from error

    def _start(self) -> subprocess.Popen[bytes]:
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

    def check(self) -> bool:
        """Restart workers that have died. Returns False if they die too often."""
        if self._ending is not None:
            return True
        for index, process in enumerate(self._processes):
            code = process.poll()
            if code is None:
                continue
            now = time.monotonic()
            self._deaths = [death for death in self._deaths if death > now - _WINDOW] + [now]
            if len(self._deaths) > _DEATHS * len(self._processes):
                log.error("Server processes keep dying, the last with exit code %d", code)
                return False
            log.error("Server process %d ended with exit code %d: restarting it", process.pid, code)
            try:
                self._processes[index] = self._start()
            except OSError as error:  # tried again at the next check
                self._deaths.pop()
                log.error("A server process cannot be started now: %s", error.strerror)
        return True

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def end(self) -> None:
        """Ask all workers to finish their requests and exit. May be called twice."""
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
