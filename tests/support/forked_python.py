"""Python processes of tests as forks of one that has imported torch.

Importing takes most of the time of a short server's life, and the suite starts hundreds. Here
`subprocess.Popen` asks a *template* process for a fork instead, where the command is `modulm`, one
of the project's modules or a script. The fork runs the command from the beginning, in its own
environment, folder and file descriptors; only modules are shared. It is a true child of its caller:
an intermediate parent ends at once, and the kernel hands its child to the next subreaper above,
which the caller is for that moment (prctl(2), PR_SET_CHILD_SUBREAPER). A fork has a template of its
own for the processes that it starts.

Nothing is forked on systems other than Linux. Commands whose environment matters while modules are
imported get an interpreter of their own, as do tests with the fixture `own_interpreters`.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

#: Variables that are read while modules are imported, or by the interpreter itself.
_READ_AT_IMPORT = (
    "ATEN_", "CUDA_", "GOMP_", "HF_", "KMP_", "LANG", "LC_", "LD_", "MKL_", "OMP_", "PYTHON",
    "SSL_", "TOKENIZERS_", "TRANSFORMERS_", "TRITON_",
)  # fmt: skip
#: These are set in the fork, or read by nothing there; Ray sets the last.
_SET_IN_FORK = frozenset(
    {"PYTHONPATH", "PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONBREAKPOINT"}
)
#: Modules that may run in a fork. Helpers whose memory has a bound of its own start from nothing.
_MODULES = frozenset(
    {
        "modulm",
        "modulm.cli.main",
        "modulm_command_plugins.doctor",
        "modulm_isolation.child",
        "modulm_distributed.testing",
        "modulm_distributed.worker_process",
        "modulm_server.api_worker",
        "modulm_server.engine.launch",
        "modulm_structured_output.compile_process",
        "pytest",
        "torch.distributed.run",
        "vllm.entrypoints.openai.api_server",
    }
)
_PR_SET_CHILD_SUBREAPER = 36
_SCRIPT = str(Path(sys.executable).with_name("modulm"))
_MAX_MESSAGE = 1 << 20
_MAX_FDS = 200
#: Bytes of a fork's command line in the process table; a longer one is cut.
_MAX_TITLE = 4000

#: How the code of a worker of pytest-xdist begins.
_WORKER = "import sys;exec("
#: What commands and tests import most, beside the plugins.
_IMPORTED = (
    "anthropic", "av", "cattrs.gen", "compressed_tensors", "docx", "gguf", "hypothesis",
    "llguidance", "mcp", "mistral_common", "ollama", "openai", "openpyxl", "pptx", "pydantic.v1",
    "pytest", "ray.serve", "schemathesis", "tensorizer", "tokenizers", "torch",
    "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama",
    "uvicorn.main", "uvicorn.protocols.http.httptools_impl", "websockets.sync.client",
    "modulm_grammar_xgrammar.library",
    "modulm.cli.main", "modulm.engine.worker.worker", "modulm.plugins.extension",
    "modulm.plugins.hooks", "modulm_cli.flags", "modulm_frontend.llm", "modulm_server.app",
    "modulm_server.engine.async_llm", "modulm_server.engine.engine_process", "modulm_server.serve",
    "modulm_structured_output.compile_process",
)  # fmt: skip

_execute: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
#: Set in a fork, which has a template already.
_INSTALLED = getattr(_execute, "templates", None)
_SIGNATURE = inspect.signature(_execute)


class Templates:
    """The template of this process, started when it is first needed."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        self.enabled = sys.platform == "linux"
        self._connection = connection
        self._environment: dict[str, str] = {}
        self._lock = threading.Lock()

    def install(self) -> None:
        """Let `subprocess.Popen` fork where it can; the environment is the template's from now."""
        if self is _INSTALLED:
            return
        self._environment = dict(os.environ)

        def execute_child(process: Any, *args: Any) -> None:
            call = SimpleNamespace(**_SIGNATURE.bind(process, *args).arguments)
            request = self.enabled and _request(call, self._environment)
            if request:
                self._fork(process, call, request)
            else:
                _execute(process, *args)

        execute_child.templates = self  # type: ignore[attr-defined]
        subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]

    def _fork(self, process: Any, call: Any, request: dict[str, Any]) -> None:
        """Start `process` as a fork."""
        streams = (call.p2cread, call.c2pwrite, call.errwrite)
        standard = [own if fd == -1 else fd for own, fd in enumerate(streams)]
        with self._lock:
            if self._connection is None:
                self._connection = _start(self._environment)
            with _subreaper():
                message = json.dumps(request).encode()
                socket.send_fds(self._connection, [message], [*standard, *call.pass_fds])
                answer = self._connection.recv(64)
        if not answer:
            raise RuntimeError("the template of forked processes has ended")
        process.pid = int(answer)
        process._child_created = True
        process._close_pipe_fds(
            call.p2cread, call.p2cwrite, call.c2pread, call.c2pwrite, call.errread, call.errwrite
        )


def _request(call: Any, template: Mapping[str, str]) -> dict[str, Any] | None:
    """What a template has to know of a call of Popen's; none if it cannot fork for it.

    template: the environment in which the template imported its modules.
    """
    command = _command(call.args)
    env = os.environ if call.env is None else call.env
    env = {os.fsdecode(key): os.fsdecode(value) for key, value in env.items()}
    if command is None or read_at_import(env) != read_at_import(template):
        return None
    if call.preexec_fn or call.executable or call.shell or not call.close_fds:
        return None
    owner = (call.gid, call.gids, call.uid, call.umask, call.process_group)
    if owner != (None, None, None, -1, -1):
        return None
    return {
        "command": command,
        "title": [os.fsdecode(arg) for arg in call.args],
        "env": env,
        "cwd": os.path.abspath(os.fsdecode(call.cwd or ".")),
        "from_cwd": {"-m", "-P"} & {*call.args[1:3]} == {"-m"} and not env.get("PYTHONSAFEPATH"),
        "session": call.start_new_session,
        "targets": [0, 1, 2, *call.pass_fds],
    }


TEMPLATES: Templates = _INSTALLED or Templates()


def _command(args: Any) -> list[str] | None:
    """`[module or script, *arguments]` of a command that may be forked."""
    if isinstance(args, (str, bytes, os.PathLike)):
        return None
    first, *rest = (os.fsdecode(arg) for arg in args)
    if first == _SCRIPT:
        return ["modulm.cli.main", *rest]
    if first != sys.executable:
        return None
    rest = rest[rest[:1] == ["-u"] or rest[:2] == ["-P", "-m"] :]
    if rest[:1] == ["-c"] and rest[1].startswith(_WORKER):
        return rest
    if rest and rest[0].endswith(".py"):
        return rest
    return rest[1:] if rest[:1] == ["-m"] and rest[1] in _MODULES else None


def read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    """Variables that decide which modules are imported, or with which settings."""
    return {
        key: value
        for key, value in env.items()
        if key.startswith(_READ_AT_IMPORT) and key not in _SET_IN_FORK
    }


def _start(environment: dict[str, str]) -> socket.socket:
    """The connection to a new template, an interpreter that imports what most commands do."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno()), " " * _MAX_TITLE],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
    return ours


@contextmanager
def _subreaper() -> Iterator[None]:
    """While this lasts, orphans among the descendants become this process's children."""
    _set_subreaper(1)
    try:
        yield
    finally:
        _set_subreaper(0)


def _set_subreaper(value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def serve(connection: socket.socket) -> None:
    """Be a template: fork for each request, until the caller has ended. Forks run the request."""
    while True:
        data, fds, _, _ = socket.recv_fds(connection, _MAX_MESSAGE, _MAX_FDS)
        if not data:
            return
        reading, writing = os.pipe()
        between = os.fork()
        if not between:
            parent = os.getpid()
            child = os.fork()
            if child:
                os.write(writing, b"%d" % child)
                os._exit(0)
            while os.getppid() == parent:  # programs remember who their parent is
                time.sleep(0.0005)
            connection.detach()  # its descriptor is closed, and its number given out again
            leave_with(partial(run, json.loads(data), fds))
        for fd in (*fds, writing):
            os.close(fd)
        os.waitpid(between, 0)
        connection.send(os.read(reading, 64))
        os.close(reading)


def leave_with(program: Callable[[], None]) -> None:
    """Run a program and end this process as an interpreter does, but for freeing what it imported:
    that would copy all memory that it shares with the template.
    """
    status = 0
    try:
        program()
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        raise  # the interpreter ends by the signal
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status & 0xFF)


def run(request: dict[str, Any], fds: list[int]) -> None:
    """Do what an interpreter does with the command, from its beginning."""
    if request["session"]:
        os.setsid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        nothing = os.open(os.devnull, os.O_RDWR)
        place([nothing, nothing, nothing, theirs.detach()], [0, 1, 2, 3])
        ours.detach()
        serve(socket.socket(fileno=3))
        os._exit(0)
    theirs.close()
    targets = request["targets"]
    place([*fds, ours.detach()], [*targets, max(targets) + 1])
    connection = socket.socket(fileno=max(targets) + 1)
    connection.set_inheritable(False)
    Templates(connection).install()

    set_title(request["title"])
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [*([request["cwd"]] if request["from_cwd"] else []), *paths]
    if folder := os.environ.get("MODULM_FAULTS"):
        sys.path.insert(0, os.path.dirname(__file__))
        importlib.import_module("fault_sweep").watch(Path(folder))
        del sys.path[0]
    sys.argv = request["command"]
    main = sys.argv[0]
    if main == "-c":
        exec(sys.argv.pop(1), {"__name__": "__main__"})
    elif main.endswith(".py"):
        sys.path[0:0] = [os.path.dirname(os.path.abspath(main))]
        runpy.run_path(main, run_name="__main__")
    else:
        sys.modules.pop(main, None)
        runpy.run_module(main, run_name="__main__", alter_sys=True)


def set_title(command: list[str]) -> None:
    """Show the command in the process table, instead of the template's own arguments."""
    # The 48th and 49th field of proc_pid_stat(5); the second is a name in parentheses.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[45:47])
    title = "\0".join(command).encode(errors="surrogateescape")[: end - start - 1]
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(title.ljust(end - start, b"\0"))


def place(fds: list[int], targets: list[int]) -> None:
    """Give descriptors these numbers, and close all others."""
    free = max(*targets, *fds) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, free) for fd in fds]
    for fd, target in zip(moved, targets, strict=True):
        os.dup2(fd, target)
    low = 0
    for target in (*sorted(targets), os.sysconf("SC_OPEN_MAX")):
        if low < target:  # closerange(0, 0) closes everything
            os.closerange(low, target)
        low = target + 1


def _plugins() -> Iterator[str]:
    """The modules of all installed plugins."""
    points = entry_points()
    for group in points.groups:
        if group.partition(".")[0] == "modulm":
            yield from (point.module for point in points.select(group=group))


if __name__ == "__main__":
    gc.disable()  # what is imported stays
    for name in (*_IMPORTED, *_plugins()):
        with suppress(ImportError):  # of a package whose extra is not installed
            importlib.import_module(name)
    sys.path.insert(0, os.path.dirname(__file__))
    importlib.import_module("listings").share()
    del sys.path[0]
    if threading.active_count() != 1:
        raise RuntimeError(f"threads do not survive a fork: {threading.enumerate()}")
    gc.freeze()
    gc.enable()
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)
