"""The secret that machines share; clients that know it may connect over TLS."""

from __future__ import annotations

import os
import secrets
import socket
import stat
from contextlib import suppress
from pathlib import Path

from modulm.config.environ import variables
from modulm.errors import ConfigError

__all__ = ["keep_alive", "read_secret", "secret_file"]

#: Minimum bytes of a secret.
_LEAST = 16
_FLAG = "data_parallel_secret_file"


def secret_file(host: str, file: str | None, flag: str = _FLAG) -> str:
    """Return `file`, or a file of this user if only this machine can reach the address.

    The user's file is created if needed. Raises ConfigError for `flag`.
    """
    if file is not None:
        read_secret(file, flag)
        return file
    address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    if not (str(address).startswith("127.") or address == "::1"):
        raise ConfigError(
            flag, f"{host} is reachable from other machines: use a file with the same secret "
                "on all of them",
        )  # fmt: skip
    try:
        return str(_own_file(flag))
    except OSError as error:
        raise ConfigError(
            flag, f"{error.filename}: {error.strerror}; use a readable file"
        ) from error


def read_secret(file: str, flag: str = _FLAG) -> bytes:
    """Read the secret from a file. Raises ConfigError for `flag` if it is unusable."""
    try:
        secret = Path(file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(flag, f"{file}: {error.strerror}") from error
    if len(secret) < _LEAST:
        raise ConfigError(flag, f"{file}: has less than {_LEAST} bytes")
    return secret


def _open_private(path: str, flags: int) -> int:
    """Open a file that only this user may read."""
    return os.open(path, flags, 0o600)


def _own_file(flag: str) -> Path:
    """This user's file, readable only by the user. Raises OSError, ConfigError."""
    cache = variables().get("XDG_CACHE_HOME")
    folder = (Path(cache) if cache else Path.home() / ".cache") / "modulm"
    file = folder / "data-parallel-secret"
    if not file.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = folder / f"{file.name}.{secrets.token_hex(8)}"
        try:
            with open(draft, "x", opener=_open_private) as sink:
                sink.write(secrets.token_hex(32))
            with suppress(FileExistsError):  # created by another process of this user
                os.link(draft, file)
        finally:
            draft.unlink(missing_ok=True)
    status = file.lstat()
    private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
    if not stat.S_ISREG(status.st_mode) or not private:
        raise ConfigError(
            flag, f"{file} must be readable by you only: remove it, or use another file"
        )
    return file


def keep_alive(peer: socket.socket) -> None:
    """Set socket options: detect a dead peer, and send small frames immediately."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5)):
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, vars(socket)[option], value)
