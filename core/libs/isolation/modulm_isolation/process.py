"""The process of an isolated package: calls with a time limit, and restarts."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from modulm.config.environ import isolated
from modulm.errors import PluginBroken
from modulm_isolation.channel import Channel, Closed
from modulm_isolation.needs import Needs, needs_of
from modulm_isolation.terms import IsolationError, Limits, parse_term

if TYPE_CHECKING:
    from modulm.plugins.declaration import Declaration

__all__ = ["IsolatedDriver", "IsolatedProcess", "close_all", "driver_of"]

log = logging.getLogger("modulm.plugins")

#: Seconds in which a process must be ready, imports of torch included.
_START_TIMEOUT = 120.0
#: Seconds between restarts: doubled from the second on, up to the last. A process that ended as
#: often as _MOST_ENDS within _WINDOW seconds is not started again.
_FIRST_WAIT, _LAST_WAIT, _MOST_ENDS, _WINDOW = 0.5, 30.0, 8, 600.0
#: Variables that are not passed on.
_SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL")

#: Answers a question of the process during a call: (method, arguments) -> a plain value.
Answers = Callable[[str, Sequence[Any]], Any]


class IsolatedProcess:
    """Runs the plugins of one package; started by the first call, and again after it ended.

    `generation` counts starts, so that callers notice that the process has lost its objects.
    `enforced` says what confines it, `restarts` how often it was started again.
    """

    def __init__(
        self,
        origin: str,
        limits: Limits,
        needs: Needs,
        imports: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.origin = origin
        self.generation = 0
        self.enforced: Sequence[str] = ()
        self._limits = limits
        self._needs = needs
        self._imports = list(imports)
        self._clock = clock
        self._lock = threading.RLock()
        self._ends: deque[float] = deque(maxlen=_MOST_ENDS)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._forgotten: list[int] = []
        self._requests: socket.socket | None = None
        _processes.add(self)

    @property
    def restarts(self) -> int:
        """How often the process was started again."""
        return max(self.generation - 1, 0)

    @property
    def timeout(self) -> float:
        """Seconds that a call may take."""
        return self._limits.timeout

    @property
    def pid(self) -> int | None:
        """The process's id while it runs."""
        return None if self._process is None else self._process.pid

    def connect(self) -> socket.socket:
        """Return a new connection to the process, which gets its other end as a request.

        Raises IsolationError if the process is not running.
        """
        with self._lock:
            if self._requests is None:
                raise IsolationError(f"the process of {self.origin} is not running")
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(self._requests, [b"r"], [theirs.fileno()])
                except OSError as error:
                    ours.close()
                    how = self._end()
                    message = f"the process of {self.origin} {how}, and is started again"
                    raise IsolationError(message) from error
            return ours

    def forget(self, reference: int) -> None:
        """Drop an object of the process with the next call; safe in finalizers."""
        self._forgotten.append(reference)

    def call(
        self,
        what: str,
        server: str,
        method: str,
        *arguments: Any,
        answers: Answers | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Call a method of `server` ("package.module:Class") in the process.

        what: names the plugin in errors. answers: for questions that the process may ask meanwhile.
        timeout: seconds, instead of the package's limit.
        Raises what the plugin raised if it is of `modulm.errors`, otherwise PluginBroken, and
        IsolationError if the process ended, or the call took longer than its time limit, which ends
        the process.
        """
        with self._lock:
            channel = self._started()
            seconds = self.timeout if timeout is None else timeout
            deadline = time.monotonic() + seconds
            forgotten, self._forgotten = self._forgotten, []
            try:
                channel.send([server, method, arguments, forgotten], deadline)
                return self._result(channel, what, method, deadline, answers)
            except TimeoutError:
                self._end()
                raise IsolationError(
                    f"{what}: {method} took more than {seconds:g} s; the process of "
                    f"{self.origin} was ended and is started again"
                ) from None
            except Closed:
                how = self._end()
                raise IsolationError(
                    f"{what}: the process of {self.origin} {how} in {method}, and is started again"
                ) from None

    def _result(
        self, channel: Channel, what: str, method: str, deadline: float, answers: Answers | None
    ) -> Any:
        from modulm_wire.frames import pack_error, unpack_error

        while True:
            kind, *rest = channel.receive(deadline)
            if kind == "done":
                return rest[0]
            if kind == "refused":
                error = unpack_error(rest[0])
                raise error or PluginBroken(f"{what}: {method} raised an error")
            if kind == "raised" or answers is None:
                raise PluginBroken(f"{what}: {method} raised {rest[0]}")
            try:
                answer = ["answer", answers(rest[0], rest[1])]
            except Exception as error:  # the plugin's question was wrong: it gets the error
                answer = ["raised", pack_error(error)]
            channel.send(answer, deadline)

    def _started(self) -> Channel:
        if self._channel is not None:
            return self._channel
        self._check_restart()
        ours, theirs = socket.socketpair()
        requests, served = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptors = theirs.fileno(), served.fileno()
        with theirs, served:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "modulm_isolation.child", *map(str, descriptors)],
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    env=_environment(),
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                requests.close()
                raise IsolationError(
                    f"the process of {self.origin} cannot be started: {error.strerror}"
                ) from error
        channel = self._channel = Channel(ours)
        self._requests = requests
        deadline = time.monotonic() + _START_TIMEOUT
        needs = self._needs
        memory = self._limits.memory or needs.memory
        setup = {
            "path": [path for path in sys.path if path],
            "imports": self._imports,
            "confinement": [memory, needs.network, needs.subprocesses, needs.files],
        }
        try:
            channel.send(setup, deadline)
            self.enforced = channel.receive(deadline)
        except (TimeoutError, Closed) as error:
            how = self._end()
            raise IsolationError(f"the process of {self.origin} {how} while it started") from error
        self.generation += 1
        log.log(
            logging.WARNING if self.restarts else logging.INFO,
            "%s runs in a process of its own, %d; enforced: %s",
            *(self.origin, self._process.pid, ", ".join(self.enforced)),
        )
        return channel

    def _check_restart(self) -> None:
        """Raise PluginBroken while the next start has to wait, or if there is none."""
        now = self._clock()
        recent = [end for end in self._ends if now - end < _WINDOW]
        if len(recent) == _MOST_ENDS:
            wait = _WINDOW - (now - recent[0])
            raise IsolationError(
                f"the process of {self.origin} ended {_MOST_ENDS} times in {_WINDOW / 60:g} "
                f"minutes: the next call after {wait:.0f} s starts it again"
            )
        if len(recent) < 2:
            return
        wait = min(_FIRST_WAIT * 2 ** (len(recent) - 2), _LAST_WAIT) - (now - recent[-1])
        if wait > 0:
            raise IsolationError(f"the process of {self.origin} is started again in {wait:.1f} s")

    def _end(self) -> str:
        """End the process with all that it started; return how it ended."""
        process, channel = self._process, self._channel
        if self._requests is not None:
            self._requests.close()
        self._process = self._channel = self._requests = None
        self._forgotten.clear()
        if process is None or channel is None:
            return "was not running"
        channel.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
        how = "closed its connection"
        if process.returncode is not None:
            code = process.returncode
            how = f"ended with exit code {code}"
            if code < 0:
                how = f"was killed by {signal.Signals(-code).name}"
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
        self._ends.append(self._clock())
        return how

    def end(self) -> None:
        """End the process, for example because an answer outside of `call` took too long."""
        with self._lock:
            if self._process is not None:
                self._end()

    def close(self) -> None:
        """End the process for good."""
        self.end()
        _processes.discard(self)


class IsolatedDriver:
    """One plugin of an isolated package: calls to the object that stands for it there."""

    def __init__(self, process: IsolatedProcess, declaration: Declaration, server: str) -> None:
        self.process = process
        self.declaration = declaration
        self._server = server
        #: The start of the process that imported the plugin last.
        self._imported = 0

    def call(self, method: str, *arguments: Any, answers: Answers | None = None) -> Any:
        """Call a method of the server class with the plugin's target and `arguments`.

        Importing the plugin first does not count for the time limit.
        """
        target = self.declaration.target
        what = str(self.declaration)
        process = self.process
        if process.pid is None or process.generation != self._imported:
            process.call(what, self._server, "prepare", target, timeout=_START_TIMEOUT)
            self._imported = process.generation
        return self.process.call(what, self._server, method, target, *arguments, answers=answers)


_processes: WeakSet[IsolatedProcess] = WeakSet()
_by_package: dict[tuple[str, str], IsolatedProcess] = {}


def driver_of(
    declaration: Declaration, term: str, server: str, imports: Sequence[str] = ()
) -> IsolatedDriver:
    """Return the plugin in the process of its package, which all of its plugins share.

    server: class that stands for it there. imports: modules that the process imports before it is
    confined. Raises ConfigError for an invalid term or manifest.
    """
    key = declaration.distribution, term
    process = _by_package.get(key)
    if process is None:
        limits = parse_term(term)[1]
        needs = needs_of(declaration.target)
        process = IsolatedProcess(declaration.origin, limits, needs, imports)
        _by_package[key] = process
    return IsolatedDriver(process, declaration, server)


def close_all() -> None:
    """End the processes of all isolated packages; a later load starts new ones."""
    for process in list(_processes):
        process.close()
    _by_package.clear()


def _environment() -> Mapping[str, str]:
    """The variables of the process: all but those whose names suggest secrets."""
    return {
        name: value
        for name, value in isolated().items()
        if not any(word in name.upper() for word in _SECRETS)
    }


atexit.register(close_all)
