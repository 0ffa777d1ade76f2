"""Starts the engine's process (`engine_process.main`).

It takes longest to get ready, so `modulm serve` starts it before it imports the HTTP server. This
module therefore imports nothing heavy.
"""

from __future__ import annotations

import logging
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from modulm.config.environ import isolated
from modulm.errors import EngineDead, EngineError
from modulm_distributed.tls import Connection, TlsSession, tls_contexts
from modulm_fleet.secret import keep_alive, read_secret
from modulm_server.output import forward

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.plugins.manager import PluginManager

__all__ = ["EngineProcess", "address_of", "connect"]

log = logging.getLogger("modulm.engine")

#: The module that the process runs.
_MODULE = "modulm_server.engine.engine_process"
#: Seconds that a process has to end after it was asked to.
_GRACE = 5.0
#: Seconds to wait for a killed process. On a busy machine that takes a while; one that is held by a
#: device's driver may not end at all.
_KILLED = 20.0
#: Seconds to wait for its last output.
_LAST_OUTPUT = 1.0
#: Seconds in which another machine must answer.
_CONNECT_TIMEOUT = 5.0


class EngineProcess:
    """Starts and ends the engine's process. `address` is where further front ends connect.

    The process imports what it needs and waits for `start`, which it accepts only on `connection`,
    an inherited socket. Nothing here blocks; `ProcessCoreClient` waits until the model is loaded.

    Raises EngineError if the machine has no room for a process.

    address: of a process that this one replaces. listener: a TCP socket to serve instead of a local
    one, for front ends of other machines that know the secret in `secret_file`. loads_model: the
    model will run in this process, so it imports what that needs while it waits.
    """

    def __init__(
        self,
        address: str | None = None,
        listener: socket.socket | None = None,
        secret_file: str | None = None,
        *,
        loads_model: bool = False,
    ) -> None:
        self._folder: Path | None = None
        self._started = False
        if listener is None:
            try:
                listener, self._folder = _listening(address)
            except OSError as error:
                message = f"the engine's socket cannot be created: {error.strerror or error}"
                raise EngineError(message) from error
        else:
            if secret_file is None:
                raise EngineError("an engine on TCP requires a secret")
            listener = listener.dup()
        self.address = address_of(listener)
        sockets: tuple[socket.socket, ...] = ()
        try:
            sockets = ours, theirs = socket.socketpair()
            command = [sys.executable, "-m", "modulm_server.engine.launch", _MODULE]
            self._process = subprocess.Popen(
                [
                    *command,
                    str(theirs.fileno()),
                    str(listener.fileno()),
                    secret_file or "",
                    *(["loads-model"] if loads_model else []),
                ],
                pass_fds=(theirs.fileno(), listener.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=isolated(),
            )
        except BaseException as error:
            for one in sockets:
                one.close()
            self._remove_folder()
            if isinstance(error, OSError):
                reason = error.strerror
                raise EngineError(f"the engine's process cannot be started: {reason}") from error
            raise
        finally:
            listener.close()
        theirs.close()
        self.connection = Connection(ours)
        if self._process.stdout is not None:
            self._printing = forward(self._process.stdout)

    def start(self, config: EngineConfig, plugins: PluginManager) -> None:
        """Send the process its configuration and plugins."""
        from modulm_wire import frames

        packed = frames.pack_plugins(plugins.snapshot())
        try:
            self.connection.socket.sendall(frames.pack("start", frames.pack_config(config), packed))
        except OSError as error:
            raise EngineDead(self.ending()) from error
        self._started = True

    @property
    def pid(self) -> int:
        """The engine process's id."""
        return self._process.pid

    def ending(self) -> str:
        """How the process ended, for error messages."""
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            if code < 0:
                return f"the engine's process was killed by {signal.Signals(-code).name}"
            return f"the engine's process ended with exit code {code}"
        return "the engine's process closed its connection"

    def dump_stacks(self) -> None:
        """Make the process write the stacks of its threads, even if its interpreter is stuck."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Kill the process, even if it is suspended."""
        self._process.kill()

    def close(self) -> None:
        """End the process; may be called twice."""
        self.connection.socket.close()
        if not self._started:
            self._process.kill()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            try:
                self._process.wait(_KILLED)
            except subprocess.TimeoutExpired:
                log.error("The engine's process %d was killed and has not ended yet", self.pid)
        self._printing.join(_LAST_OUTPUT)
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _listening(address: str | None) -> tuple[socket.socket, Path]:
    """Create a listening socket in a new folder; returns both."""
    if address is None:
        folder = Path(tempfile.mkdtemp(prefix="modulm-"))
    else:
        folder = Path(address).parent
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(folder / "engine"))
            listener.listen(64)
        except BaseException:
            listener.close()
            raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return listener, folder


def address_of(listener: socket.socket) -> str:
    """The address of a socket: a path, or HOST:PORT."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return str(name)
    return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"


def connect(address: str, secret_file: str | None = None) -> Connection:
    """Connect to the engine that listens at `address`, a path or HOST:PORT.

    secret_file: for an engine that is reached over TCP. Raises EngineDead if there is none, or it
    has another secret.
    """
    try:
        if address.startswith("/"):
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                peer.connect(address)
            except BaseException:
                peer.close()
                raise
            return Connection(peer)
        if secret_file is None:
            raise EngineError("an engine on TCP requires a secret")
        host, _, port = address.rpartition(":")
        session = TlsSession(tls_contexts(read_secret(secret_file)))
        peer = socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT)
        try:
            keep_alive(peer)
            session.handshake(peer)
            peer.settimeout(None)
        except BaseException:
            peer.close()
            raise
    except OSError as error:
        raise EngineDead(f"there is no engine at {address}: {error}") from error
    return Connection(peer, session)
