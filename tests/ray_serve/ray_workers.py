"""Ray's worker processes as forks of one that has imported torch and the server.

Ray starts a worker as `python SETUP default_worker.py ...`, and the path of SETUP is a parameter of
a node. Each would import Ray twice, and torch, which takes most of a small cluster's time. Here the
file itself is SETUP: it asks the template, which is this file as well, for a fork that runs the
rest of the command, and ends when the fork does. Ray itself reads a worker's environment when it is
imported: the template does not.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

#: The environment variable with the path of the template's socket.
TEMPLATE = "RAY_TEMPLATE_OF_WORKERS"
_MOST = 1 << 20
_IMPORTED = (
    "torch", "tokenizers", "uvicorn.main", "uvicorn.protocols.http.httptools_impl",
    "modulm.engine.worker.worker", "modulm.plugins.extension", "modulm.plugins.hooks",
    "modulm_distributed.worker_process", "modulm_frontend.llm", "modulm_server.app",
    "modulm_server.engine.async_llm", "modulm_server.engine.engine_process", "modulm_server.serve",
)  # fmt: skip


def serve(path: str) -> None:
    """Be the template: fork for each connection, while the process that started it lives."""
    from functools import partial
    from importlib import import_module
    from importlib.metadata import entry_points

    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(__file__)), "support"))
    forked_python = import_module("forked_python")
    for name in (*_IMPORTED, *(point.module for point in entry_points(group="modulm.routes"))):
        import_module(name)
    if "ray" in sys.modules:
        raise RuntimeError("the template of Ray's workers has imported Ray")
    owner = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets those that have ended
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        listener.settimeout(2)
        while os.getppid() == owner:
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                data, fds, _, _ = socket.recv_fds(connection, _MOST, 3)
                child = os.fork()
                if not child:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    forked_python.leave_with(partial(forked_python.run, json.loads(data), fds))
                connection.send(b"%d" % child)
                connection.close()
                for fd in fds:
                    os.close(fd)


def ask(arguments: list[str]) -> None:
    """Be SETUP: run the command as a fork, in this process's environment."""
    own = "--serialized-runtime-env-context=", "--language="
    context = next((word for word in arguments if word.startswith(own[0])), own[0] + "{}")
    os.environ.update(json.loads(context.removeprefix(own[0]) or "{}").get("env_vars") or {})
    command = [word for word in arguments if not word.startswith(own)]
    request = {
        "command": command, "title": [sys.executable, *command], "env": dict(os.environ),
        "cwd": os.getcwd(), "from_cwd": False, "session": False, "targets": [0, 1, 2],
    }  # fmt: skip
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(os.environ[TEMPLATE])
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        child = int(connection.recv(64))
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, number))
    with suppress(ProcessLookupError):
        ended = select.poll()
        ended.register(os.pidfd_open(child), select.POLLIN)
        ended.poll()


@contextmanager
def template(folder: str) -> Iterator[str]:
    """The socket of a template, for TEMPLATE, while this lasts."""
    import subprocess

    path = os.path.join(folder, "workers")
    command = [sys.executable, "-P", __file__, "--template", path]
    process = subprocess.Popen([*command, " " * 4000])  # room for the commands of forks
    try:
        while not os.path.exists(path):
            if process.poll() is not None:
                raise RuntimeError("the template of Ray's workers has ended")
            select.select([], [], [], 0.01)
        yield path
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    if sys.argv[1] == "--template":
        serve(sys.argv[2])
    else:
        ask(sys.argv[1:])
