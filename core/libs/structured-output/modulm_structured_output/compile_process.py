"""Trial compilation of constraints in separate processes, with limits on time and memory.

Constraints that compile there are compiled again where they are used. Compiled grammars are not
transferred: serialized, those of xgrammar can be hundreds of megabytes and take longer to read than
to compile (ADR 0039). Processes are started when they are needed, and replaced after they were
killed.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

import attrs

from modulm.contracts.grammar import GrammarBackend
from modulm.contracts.sampling import StructuredOutputs
from modulm.errors import ModulmError, QueueFull, RequestError
from modulm.plugins import manager
from modulm.plugins.manager import PluginManager
from modulm_structured_output.backends import as_request_error, compile_by, open_backends
from modulm_tokenizers.tokenizer import open_tokenizer
from modulm_wire import frames

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = ["CompileProcesses"]

#: Seconds that a process may take to import its backends.
_STARTING = 120.0
#: Seconds that a process may take to end after its socket was closed.
_ENDING = 0.5


class CompileProcesses:
    """Processes for trial compilation, each used by one thread at a time.

    path: of the tokenizer. Flags limit the seconds and bytes of a constraint.
    """

    def __init__(
        self,
        config: EngineConfig,
        path: str,
        vocabulary: int,
        stop_ids: tuple[int, ...],
        plugins: PluginManager,
    ) -> None:
        """Raise PluginError if the plugins cannot be used in another process."""
        self._seconds = config.structured_outputs.compile_timeout
        packed = frames.pack_plugins(plugins.snapshot())
        # Registered objects cannot be sent to other processes and are not needed to compile.
        flags = frames.pack_config(config.with_(logits_processors=None))
        self._told = (flags, packed, path, vocabulary, list(stop_ids))
        self._lock = threading.Lock()
        self._idle: list[_Process] = []

    def check(self, constraint: StructuredOutputs) -> None:
        """Check that the constraint compiles. Raises RequestError if it does not."""
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
        """Compile in a process and return its reply. Retries once if it was killed from outside."""
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
        """End idle processes; busy ones end within their limits."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()


class _Process:
    """A process connected by a socket."""

    def __init__(self, told: tuple[Any, ...]) -> None:
        """Raises QueueFull if the machine has no room for a process now."""
        try:
            self._start()
        except OSError as failed:
            raise QueueFull(
                f"no process can be started to compile a constraint: {failed.strerror}",
                "structured_outputs",
            ) from failed
        self._stream = self._socket.makefile("rb")
        reply = self.ask(_STARTING, *told)
        error = None if reply is None else frames.unpack_error(reply[0])
        if reply is None or error is not None:
            self.end()
            raise error or ModulmError("the process that compiles constraints does not start")

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            except BaseException:
                self._socket.close()
                raise

    def ask(self, seconds: float, *frame: Any) -> list[Any] | None:
        """Wait for the reply; None on timeout, or if the process ended."""
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall(frames.pack(*frame))
            return _next(self._stream)
        except OSError:
            return None

    def killed(self) -> bool:
        """Whether it was killed from outside: its limits do not cause SIGKILL."""
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
    """Compile constraints from the socket until it is closed; the body of the process."""
    stream = peer.makefile("rb")
    flags, plugins, path, vocabulary, stops = _next(stream) or sys.exit(0)
    config = frames.unpack_config(flags)
    settings = config.structured_outputs
    with manager.using(PluginManager.replay(frames.unpack_plugins(plugins))):
        error: Exception | None = None
        backends: list[GrammarBackend] = []
        for absent in ("torch", ""):
            try:
                with _without(absent):
                    backends = _open(config, path, vocabulary, stops)
                error = None
                break
            except Exception as failed:
                error = failed
        _limit(resource.RLIMIT_AS, _address_space() + settings.compile_memory)
        while True:
            peer.sendall(frames.pack(frames.pack_error(error)))
            frame = _next(stream)
            if frame is None:
                return
            # The process ends by itself if its parent is gone.
            used = resource.getrusage(resource.RUSAGE_SELF)
            seconds = used.ru_utime + used.ru_stime + 2 * settings.compile_timeout
            _limit(resource.RLIMIT_CPU, int(seconds) + 1)
            error = None
            try:
                compile_by(backends, StructuredOutputs(**frame[0]))
            except Exception as failed:
                error = as_request_error(failed)


def _open(
    config: EngineConfig, path: str, vocabulary: int, stops: list[int]
) -> list[GrammarBackend]:
    """Open the backends, and try the first one."""
    tokenizer = open_tokenizer(config, path)
    if tokenizer is None:
        raise RequestError("structured outputs need a tokenizer", "structured_outputs")
    backends = open_backends(config, tokenizer, vocabulary, tuple(stops), manager.current())
    compile_by(backends, StructuredOutputs(choice=["a"]))
    return backends


@contextmanager
def _without(package: str) -> Iterator[None]:
    """Make a package appear not to be installed; an empty name hides nothing.

    Trial compilation computes no tensors: torch, which libraries import where they find it, would
    only take 150 MB.
    """

    class Absent(MetaPathFinder):
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(f"{name} is not imported here", name=name)

    finder = Absent()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _limit(what: int, least: int) -> None:
    """Lower the soft limit of a resource, within the hard one."""
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (least if hard < 0 else min(least, hard), hard))


def _address_space() -> int:
    """Return the size of this process's address space in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _next(stream: Any) -> list[Any] | None:
    size = int.from_bytes(stream.read(4), "big")
    return frames.unpack(stream.read(size)) if size else None


if __name__ == "__main__":
    os.nice(5)
    for number in (signal.SIGINT, signal.SIGHUP):  # of the terminal, for the owner
        signal.signal(number, signal.SIG_IGN)
    with suppress(BrokenPipeError):
        _serve(socket.socket(fileno=int(sys.argv[1])))
