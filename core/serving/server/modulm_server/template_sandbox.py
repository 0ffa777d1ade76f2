"""Chat templates that clients send, executed in a process that can be killed.

The sandbox keeps a template from reaching anything; a process of its own keeps it from using
more time and memory than it is given.
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

#: Of one rendering, of a worker's start, and beyond what a worker itself watches.
_SECONDS, _START_SECONDS, _SLACK = 1.0, 20.0, 1.0
#: Bytes of addresses, and characters of a text: contexts hold no longer ones.
_MEMORY, _LONGEST = 512 << 20, 4 << 20
_WAITING = 8
#: Questions after which a worker makes room for a fresh one: it keeps templates.
_QUESTIONS = 256
_TOO_MUCH = "the chat template took too long or too much memory to render"


class SandboxedRenderer:
    """One worker process, made when it is needed and replaced when it had to be killed.

    What a template fails of because others have used up the worker's memory is asked again of a
    fresh one.
    """

    def __init__(self) -> None:
        #: Seconds that one rendering may take.
        self.seconds = _SECONDS
        self._lock = threading.Lock()
        self._waiting = threading.BoundedSemaphore(_WAITING)
        self._worker: subprocess.Popen[bytes] | None = None
        self._asked = 0

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """As `modulm_chat.execute`. Raises TemplateFailed, or QueueFull under load."""
        return self._answer({"source": source, "variables": dict(variables)})

    def content_format(self, source: str) -> ContentFormat:
        """As `modulm_chat.content_format`: not even reading a template is done elsewhere."""
        return "openai" if self._answer({"source": source}) == "openai" else "string"

    def _answer(self, question: Mapping[str, Any]) -> str:
        if not self._waiting.acquire(blocking=False):
            raise QueueFull("too many chat templates wait to be rendered", "chat_template")
        try:
            with self._lock:
                asked = {**question, "seconds": self.seconds}
                text = self._ask(asked)
                text = self._ask(asked) if text is None else text
        finally:
            self._waiting.release()
        if text is None:
            raise TemplateFailed(_TOO_MUCH, "chat_template")
        return text

    def close(self) -> None:
        """End the worker."""
        with self._lock:
            self._kill()

    def _ask(self, question: Mapping[str, Any]) -> str | None:
        """The answer; None from a worker that is at its end and was not fresh."""
        dead = self._worker is not None and self._worker.poll() is not None
        if dead or self._asked >= _QUESTIONS:
            self._kill()
        fresh = self._worker is None
        worker = self._worker = self._worker or _start()
        self._asked += 1
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
        self._asked = 0


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
    data, latest = bytearray(), time.monotonic() + seconds
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([pipe], [], [], max(latest - time.monotonic(), 0.0))
        piece = os.read(pipe.fileno(), 1 << 16) if ready else b""
        if not piece:
            return b""
        data += piece
    return bytes(data)


def _serve() -> None:
    """The worker: one question a line, one answer a line."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    for line in sys.stdin.buffer:
        question = json.loads(line)
        # So that it ends even if nobody is left to end it.
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
