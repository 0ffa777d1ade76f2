"""Renders clients' chat templates in a separate process with time and memory limits.

Jinja's sandbox restricts what a template can access. The process limits its time and memory.
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
from typing import TYPE_CHECKING, Any

from modulm.errors import QueueFull
from modulm_chat.conversation import content_format
from modulm_chat.templates import TemplateFailed, execute

if TYPE_CHECKING:
    from collections.abc import Mapping

    from modulm_chat.conversation import ContentFormat

__all__ = ["SandboxedRenderer"]

#: Limits in seconds: of one rendering, of a worker's start, and the grace on top of them.
_SECONDS, _START_SECONDS, _SLACK = 1.0, 20.0, 1.0
#: Address space of a worker in bytes, and maximum characters of a rendered text.
_MEMORY, _LONGEST = 512 << 20, 4 << 20
_WAITING = 8
#: Requests after which a worker is replaced, since it caches templates.
_QUESTIONS = 256
_TOO_MUCH = "the chat template took too long or too much memory to render"


class SandboxedRenderer:
    """One worker process, started on first use and restarted after it was killed.

    If an older worker runs out of memory, the request is repeated in a new one.
    """

    def __init__(self) -> None:
        #: Time limit of one rendering in seconds.
        self.seconds = _SECONDS
        self._lock = threading.Lock()
        self._waiting = threading.BoundedSemaphore(_WAITING)
        self._worker: subprocess.Popen[bytes] | None = None
        self._questions = 0

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Render as `modulm_chat.execute` does. Raises TemplateFailed, or QueueFull under load."""
        return self._answer({"source": source, "variables": dict(variables)})

    def content_format(self, source: str) -> ContentFormat:
        """Detect the content format as `modulm_chat.content_format` does, in the worker."""
        return "openai" if self._answer({"source": source}) == "openai" else "string"

    def _answer(self, question: Mapping[str, Any]) -> str:
        if not self._waiting.acquire(blocking=False):
            raise QueueFull("too many chat templates are waiting to be rendered", "chat_template")
        try:
            with self._lock:
                timed_question = {**question, "seconds": self.seconds}
                text = self._ask(timed_question)
                text = self._ask(timed_question) if text is None else text
        finally:
            self._waiting.release()
        if text is None:
            raise TemplateFailed(_TOO_MUCH, "chat_template")
        return text

    def close(self) -> None:
        """Stop the worker."""
        with self._lock:
            self._kill()

    def _ask(self, question: Mapping[str, Any]) -> str | None:
        """Ask the worker; returns None if it failed and had served other requests before."""
        dead = self._worker is not None and self._worker.poll() is not None
        if dead or self._questions >= _QUESTIONS:
            self._kill()
        fresh = self._worker is None
        worker = self._worker = self._worker or _start()
        self._questions += 1
        if worker.stdin is None or worker.stdout is None:
            raise TemplateFailed("the chat template could not be rendered", "chat_template")
        began = time.monotonic()
        try:
            worker.stdin.write(json.dumps(question).encode() + b"\n")
            worker.stdin.flush()
            line = _line(worker.stdout, _START_SECONDS if fresh else 2 * self.seconds + _SLACK)
        except OSError:
            line = b""
        reply = json.loads(line) if line else {}
        if "text" not in reply and "error" not in reply:
            self._kill()
            if fresh or time.monotonic() - began > self.seconds:
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


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "modulm_server.template_sandbox"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env={},
    )


def _line(pipe: Any, seconds: float) -> bytes:
    """Read a line from the worker; empty if it does not arrive in time."""
    data, latest = bytearray(), time.monotonic() + seconds
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([pipe], [], [], max(latest - time.monotonic(), 0.0))
        piece = os.read(pipe.fileno(), 1 << 16) if ready else b""
        if not piece:
            return b""
        data += piece
    return bytes(data)


def _serve() -> None:
    """The worker's loop: one request per line, one reply per line."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    for line in sys.stdin.buffer:
        question = json.loads(line)
        # A CPU limit ends the worker even if its parent is gone.
        most = math.ceil(time.process_time() + 2 * question["seconds"] + 2 * _SLACK)
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
        data = json.dumps(_reply(question)).encode()
        sys.stdout.buffer.write(data + b"\n")
        sys.stdout.buffer.flush()


def _reply(question: Mapping[str, Any]) -> dict[str, Any]:
    source = question["source"]
    try:
        if "variables" not in question:
            return {"text": content_format(source)}
        return {"text": execute(source, question["variables"], question["seconds"], _LONGEST)}
    except TemplateFailed as error:
        if isinstance(error.__cause__, MemoryError):
            return {}
        return {"error": error.message, "param": error.param}


if __name__ == "__main__":
    _serve()
