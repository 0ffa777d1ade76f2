"""The process that renders templates for `modulm_chat.sandbox`; it imports only what it needs."""

from __future__ import annotations

import json
import math
import resource
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from modulm_chat.templates import TemplateFailed, content_format, execute

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SLACK"]

#: Seconds by which a rendering may exceed its limit before the process is ended.
SLACK = 1.0


def _serve(memory: int, output: int) -> None:
    """Answer one request per line with one line each, until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    for number in (signal.SIGINT, signal.SIGHUP):  # of the terminal, for the owner
        signal.signal(number, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        question = json.loads(line)
        # A CPU limit ends the worker even if its parent is gone.
        most = math.ceil(time.process_time() + 2 * question["seconds"] + 2 * SLACK)
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
        data = json.dumps(_reply(question, output)).encode()
        sys.stdout.buffer.write(data + b"\n")
        sys.stdout.buffer.flush()


def _reply(question: Mapping[str, Any], output: int) -> dict[str, Any]:
    source = question["source"]
    try:
        if "variables" not in question:
            return {"text": content_format(source)}
        return {"text": execute(source, question["variables"], question["seconds"], output)}
    except TemplateFailed as error:
        if isinstance(error.__cause__, MemoryError):
            return {}
        return {"error": error.message, "param": error.param}


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
