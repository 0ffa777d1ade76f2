"""Renders chat templates in a separate process with time and memory limits.

Jinja's sandbox restricts what a template can access. The process limits its time and memory. The
templates of checkpoints are rendered by one process that lasts, those of clients by another.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import threading
import time
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from attrs import frozen

from modulm.errors import QueueFull
from modulm_chat.sandbox_worker import SLACK
from modulm_chat.templates import MAX_SECONDS, TemplateFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from modulm_chat.templates import ContentFormat

__all__ = ["RenderLimits", "SandboxedRenderer", "checkpoint_renderer"]

#: Seconds allowed for a worker to start.
_START_SECONDS = 20.0
_TOO_MUCH = "the chat template took too long or too much memory to render"
#: Environment variables passed to a worker: where Python finds modules, and the time zone.
_VARIABLES = frozenset({"LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "TZ"})


@frozen
class RenderLimits:
    """Limits of a renderer. The defaults are for templates in requests.

    seconds: time limit of one rendering. memory: address space of the worker in bytes. output:
    maximum characters of a rendered text. waiting: maximum concurrent renderings. questions:
    renderings after which the worker is replaced, since it caches templates; None for no limit.
    """

    seconds: float = 1.0
    memory: int = 512 << 20
    output: int = 4 << 20
    waiting: int = 8
    questions: int | None = 256


#: For templates of checkpoints: few templates, any conversation that a front end accepts.
_CHECKPOINT = RenderLimits(MAX_SECONDS, 1 << 30, 64 << 20, 1 << 16, None)


class SandboxedRenderer:
    """One worker process, started on first use and restarted after it was killed.

    If an older worker runs out of memory, the request is repeated in a new one.
    """

    def __init__(self, limits: RenderLimits | None = None) -> None:
        self.limits = limits = limits or RenderLimits()
        #: Detect the content format as `modulm_chat.content_format` does, in the worker.
        self.content_format: Callable[[str], ContentFormat] = lru_cache(32)(self._content_format)
        self._lock = threading.Lock()
        self._waiting = threading.BoundedSemaphore(limits.waiting)
        self._worker: subprocess.Popen[bytes] | None = None
        #: Process that started the worker. Its forks must not use the worker's pipes.
        self._owner = 0
        self._questions = 0

    def start(self) -> None:
        """Start the worker in the background, so that the first rendering need not wait for it."""
        with self._lock:
            self._open()

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Render as `modulm_chat.execute` does. Raises TemplateFailed, or QueueFull under load."""
        return self._answer({"source": source, "variables": dict(variables)})

    def _content_format(self, source: str) -> ContentFormat:
        return "openai" if self._answer({"source": source}) == "openai" else "string"

    def _answer(self, question: Mapping[str, Any]) -> str:
        try:
            data = json.dumps({**question, "seconds": self.limits.seconds}).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateFailed(
                f"the variables of a chat template must be JSON values: {error}", "messages"
            ) from error
        if not self._waiting.acquire(blocking=False):
            raise QueueFull("too many chat templates are waiting to be rendered", "chat_template")
        try:
            with self._lock:
                text = self._ask(data)
                text = self._ask(data) if text is None else text
        finally:
            self._waiting.release()
        if text is None:
            raise TemplateFailed(_TOO_MUCH, "chat_template")
        return text

    def close(self) -> None:
        """Stop the worker."""
        with self._lock:
            self._kill()

    def _open(self) -> subprocess.Popen[bytes]:
        """Return the worker; start a new one if it is dead or at its limit of renderings."""
        if self._owner != os.getpid():
            self._worker, self._owner, self._questions = None, os.getpid(), 0
        dead = self._worker is not None and self._worker.poll() is not None
        if dead or self._questions >= (self.limits.questions or math.inf):
            self._kill()
        self._worker = self._worker or _start(self.limits)
        return self._worker

    def _ask(self, question: bytes) -> str | None:
        """Send a question to the worker; returns None if it failed after serving other requests."""
        worker = self._open()
        fresh = self._questions == 0
        self._questions += 1
        if worker.stdin is None or worker.stdout is None:
            raise TemplateFailed("the chat template could not be rendered", "chat_template")
        began, seconds = time.monotonic(), self.limits.seconds
        try:
            _write(worker.stdin, question, _START_SECONDS if fresh else seconds + SLACK)
            line = _line(worker.stdout, _START_SECONDS if fresh else 2 * seconds + SLACK)
        except OSError:
            line = b""
        reply = json.loads(line) if line else {}
        if "text" not in reply and "error" not in reply:
            self._kill()
            if fresh or time.monotonic() - began > seconds:
                raise TemplateFailed(_TOO_MUCH, "chat_template")
            return None
        if "error" in reply:
            raise TemplateFailed(reply["error"], reply["param"])
        return str(reply["text"])

    def _kill(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.wait()
            for pipe in (self._worker.stdin, self._worker.stdout):
                if pipe is not None:
                    pipe.close()
            self._worker = None
        self._questions = 0


@cache
def checkpoint_renderer() -> SandboxedRenderer:
    """Return this process's renderer for templates of checkpoints. It ends with the process."""
    return SandboxedRenderer(_CHECKPOINT)


def _start(limits: RenderLimits) -> subprocess.Popen[bytes]:
    from modulm.config.environ import isolated

    arguments = map(str, (limits.memory, limits.output))
    try:
        worker = subprocess.Popen(
            [sys.executable, "-P", "-m", "modulm_chat.sandbox_worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={name: value for name, value in isolated().items() if name in _VARIABLES},
        )
    except OSError as error:  # the machine has no room for a process now
        reason = error.strerror
        raise QueueFull(f"no process can be started to render chat templates: {reason}") from error
    if worker.stdin is not None:
        os.set_blocking(worker.stdin.fileno(), False)
    return worker


def _write(pipe: Any, data: bytes, seconds: float) -> None:
    """Write a line to the worker. Raises TimeoutError if it does not read."""
    rest, latest = memoryview(data), time.monotonic() + seconds
    while rest:
        if not _wait(pipe, select.POLLOUT, latest):
            raise TimeoutError
        rest = rest[os.write(pipe.fileno(), rest[: 1 << 16]) :]


def _line(pipe: Any, seconds: float) -> bytes:
    """Read a line from the worker; empty if none arrives in time."""
    data, latest = bytearray(), time.monotonic() + seconds
    while not data.endswith(b"\n"):
        ready = _wait(pipe, select.POLLIN, latest)
        piece = os.read(pipe.fileno(), 1 << 16) if ready else b""
        if not piece:
            return b""
        data += piece
    return bytes(data)


def _wait(pipe: Any, event: int, latest: float) -> bool:
    """Wait until a pipe is ready or closed; False if the time `latest` comes first."""
    poll = select.poll()
    poll.register(pipe.fileno(), event)
    return bool(poll.poll(max(1000 * (latest - time.monotonic()), 0.0)))
