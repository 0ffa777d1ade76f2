"""Constraints are compiled first in a process that can be ended: in limited time and memory.

What comes through there is compiled again where it is used. Compiled grammars are not handed over:
written out, xgrammar's have up to hundreds of megabytes and take longer to read than to compile
(ADR 0039). A process is started when the first constraint needs one, and again after it had to be
ended.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs

from modulm.contracts.sampling import StructuredOutputs
from modulm.errors import ModulmError, RequestError
from modulm.plugins import manager
from modulm.plugins.manager import PluginManager
from modulm_structured_output.backends import as_request_error, compile_by, open_backends
from modulm_tokenizers.tokenizer import open_tokenizer
from modulm_wire import frames

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = ["CompileProcesses"]

#: Seconds that a process gets to import its backends.
_STARTING = 120.0
#: Seconds in which a process whose socket has closed is gone.
_ENDING = 0.5


class CompileProcesses:
    """Processes in which constraints are tried, each by one thread at a time.

    path: of the tokenizer. Seconds and bytes that one constraint may take are flags.
    """

    def __init__(
        self,
        config: EngineConfig,
        path: str,
        vocabulary: int,
        stop_ids: tuple[int, ...],
        plugins: PluginManager,
    ) -> None:
        """Raises PluginError where no other process could have the same plugins."""
        self._seconds = config.structured_outputs.compile_timeout
        packed = frames.pack_plugins(plugins.snapshot())
        # Objects of the caller's could not be given away, and none is needed to compile.
        flags = frames.pack_config(config.with_(logits_processors=None))
        self._told = (flags, packed, path, vocabulary, list(stop_ids))
        self._lock = threading.Lock()
        self._idle: list[_Process] = []

    def check(self, constraint: StructuredOutputs) -> None:
        """Compile the constraint, to see whether it can be. Raises RequestError if not."""
        reply = self._tried(constraint)
        if reply is None:
            raise RequestError(
                f"structured_outputs: compiling takes more than {self._seconds:g} s, or more "
                "memory than is allowed; simplify it",
                "structured_outputs",
            )
        error = frames.unpack_error(reply[0])
        if error is not None:
            raise error

    def _tried(self, constraint: StructuredOutputs) -> list[Any] | None:
        """What a process says of it. One that somebody has killed is replaced, once."""
        for attempt in range(2):
            with self._lock:
                process = self._idle.pop() if self._idle and not attempt else None
            process = process or _Process(self._told)
            reply = process.ask(self._seconds, attrs.asdict(constraint, recurse=False))
            if reply is not None:
                with self._lock:
                    self._idle.append(process)
                return reply
            killed = process.killed()
            process.end()
            if not killed:
                break
        return None

    def close(self) -> None:
        """End the processes that are idle; busy ones end within their limits."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()


class _Process:
    """One process, at the other end of a socket."""

    def __init__(self, told: tuple[Any, ...]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._stream = self._socket.makefile("rb")
        reply = self.ask(_STARTING, *told)
        error = None if reply is None else frames.unpack_error(reply[0])
        if reply is None or error is not None:
            self.end()
            raise error or ModulmError("the process that compiles constraints does not start")

    def ask(self, seconds: float, *frame: Any) -> list[Any] | None:
        """The reply; None if it did not come in time, or the process ended."""
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall(frames.pack(*frame))
            return _next(self._stream)
        except OSError:
            return None

    def killed(self) -> bool:
        """Whether something else than its limits has ended it: these are no SIGKILL."""
        try:
            return self._process.wait(_ENDING) == -signal.SIGKILL
        except subprocess.TimeoutExpired:
            return False

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._stream.close()
        self._socket.close()


def _serve(peer: socket.socket) -> None:
    """The process: compile what comes, until nobody asks."""
    stream = peer.makefile("rb")
    flags, plugins, path, vocabulary, stops = _next(stream) or sys.exit(0)
    config = frames.unpack_config(flags)
    settings = config.structured_outputs
    with manager.using(PluginManager.replay(frames.unpack_plugins(plugins))):
        error: Exception | None = None
        try:
            tokenizer = open_tokenizer(config, path)
            if tokenizer is None:
                raise RequestError("structured outputs need a tokenizer", "structured_outputs")
            backends = open_backends(config, tokenizer, vocabulary, tuple(stops), manager.current())
            compile_by(backends, StructuredOutputs(choice=["a"]))
        except Exception as failed:
            error = failed
        _limit(resource.RLIMIT_AS, _address_space() + settings.compile_memory)
        while True:
            peer.sendall(frames.pack(frames.pack_error(error)))
            frame = _next(stream)
            if frame is None:
                return
            # It ends by itself where nobody is left to end it.
            used = resource.getrusage(resource.RUSAGE_SELF)
            seconds = used.ru_utime + used.ru_stime + 2 * settings.compile_timeout
            _limit(resource.RLIMIT_CPU, int(seconds) + 1)
            error = None
            try:
                compile_by(backends, StructuredOutputs(**frame[0]))
            except Exception as failed:
                error = as_request_error(failed)


def _limit(what: int, least: int) -> None:
    """Lower the soft limit of a resource, within the hard one."""
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (least if hard < 0 else min(least, hard), hard))


def _address_space() -> int:
    """Bytes of addresses that this process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _next(stream: Any) -> list[Any] | None:
    size = int.from_bytes(stream.read(4), "big")
    return frames.unpack(stream.read(size)) if size else None


if __name__ == "__main__":
    os.nice(5)
    with suppress(BrokenPipeError):
        _serve(socket.socket(fileno=int(sys.argv[1])))
