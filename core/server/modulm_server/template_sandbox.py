"""Chat templates that clients send, executed in a process that can be killed.

The sandbox keeps a template from reaching anything; a process of its own keeps it from using
more time and memory than it is given.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

from modulm.errors import QueueFull
from modulm.text.templates import TemplateFailed, execute

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SandboxedRenderer"]

_SECONDS = 1.0
_START_SECONDS = 20.0
_SLACK = 1.0
_MEMORY = 512 << 20
_WAITING = 8


class SandboxedRenderer:
    """One worker process, made when it is needed and replaced when it had to be killed."""

    def __init__(self) -> None:
        #: Seconds that one rendering may take.
        self.seconds = _SECONDS
        self._lock = threading.Lock()
        self._waiting = threading.BoundedSemaphore(_WAITING)
        self._worker: subprocess.Popen[bytes] | None = None

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """As `modulm.text.templates.execute`. Raises TemplateFailed, or QueueFull under load."""
        if not self._waiting.acquire(blocking=False):
            raise QueueFull("too many chat templates wait to be rendered", "chat_template")
        try:
            with self._lock:
                question = {"source": source, "variables": dict(variables)}
                return self._ask({**question, "seconds": self.seconds})
        finally:
            self._waiting.release()

    def close(self) -> None:
        """End the worker."""
        with self._lock:
            self._kill()

    def _ask(self, question: Mapping[str, Any]) -> str:
        fresh = self._worker is None or self._worker.poll() is not None
        worker = self._worker = _start() if fresh else self._worker
        if worker is None or worker.stdin is None or worker.stdout is None:
            raise TemplateFailed("the chat template could not be rendered", "chat_template")
        try:
            worker.stdin.write(json.dumps(question).encode() + b"\n")
            worker.stdin.flush()
            line = _line(worker.stdout, _START_SECONDS if fresh else 2 * self.seconds + _SLACK)
        except OSError:
            line = b""
        if not line:
            self._kill()
            raise TemplateFailed(
                "the chat template took too long or too much memory to render", "chat_template"
            )
        reply = json.loads(line)
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
    """One line of the worker, or nothing if it does not come in time."""
    data = bytearray()
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([pipe], [], [], seconds)
        piece = os.read(pipe.fileno(), 1 << 16) if ready else b""
        if not piece:
            return b""
        data += piece
    return bytes(data)


def _serve() -> None:
    """The worker: one question a line, one answer a line."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    for line in sys.stdin.buffer:
        question = json.loads(line)
        reply: dict[str, Any]
        try:
            text = execute(question["source"], question["variables"], question["seconds"])
            reply = {"text": text}
        except TemplateFailed as error:
            reply = {"error": error.message, "param": error.param}
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
