"""How two processes prove to one another over TCP that they know the same secret.

Who connects and who listens each send 32 random bytes and then a digest over both, keyed with the
secret and with who says it. What follows is neither encrypted nor signed: it is for networks that
nobody else is in.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
from pathlib import Path

from modulm.errors import ConfigError

__all__ = ["NONCE", "admit", "check_secret", "digest", "keep_alive", "prove", "read_secret"]

#: Bytes of a random number, and of a digest.
NONCE = 32


def read_secret(file: str | None) -> bytes:
    """What is in the file; nothing without one. Raises ConfigError for one that is of no use."""
    if file is None:
        return b""
    try:
        secret = Path(file).read_bytes().strip()
    except OSError as error:
        raise ConfigError("data_parallel_secret_file", f"{file}: {error.strerror}") from error
    if len(secret) < 16:
        raise ConfigError("data_parallel_secret_file", f"{file}: has less than 16 bytes")
    return secret


def check_secret(host: str, file: str | None) -> None:
    """Raise ConfigError where strangers could reach an address and nothing has to be proved."""
    read_secret(file)
    address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    if file is None and not (str(address).startswith("127.") or address == "::1"):
        raise ConfigError(
            "data_parallel_secret_file",
            f"{host} can be reached by others: give a file with the same secret on all machines",
        )


def digest(secret: bytes, who: bytes, asked: bytes, own: bytes) -> bytes:
    """The proof of `who`, b"client" or b"server"; asked: the server's number, own: the client's."""
    return hmac.new(secret, who + asked + own, hashlib.sha256).digest()


def prove(peer: socket.socket, file: str | None) -> None:
    """The client's side. Raises OSError if the other side cannot prove anything."""
    secret = read_secret(file)
    asked, own = _exactly(peer, NONCE), os.urandom(NONCE)
    peer.sendall(own + digest(secret, b"client", asked, own))
    if not hmac.compare_digest(_exactly(peer, NONCE), digest(secret, b"server", asked, own)):
        raise ConnectionRefusedError("it has another secret")


def keep_alive(peer: socket.socket) -> None:
    """Have the end of another machine noticed, and send at once what there is to send."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5)):
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, vars(socket)[option], value)


def _exactly(peer: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        piece = peer.recv(count - len(found))
        if not piece:
            raise ConnectionRefusedError("the secrets differ, or nobody listens there")
        found += piece
    return found


def admit(peer: socket.socket, file: str | None) -> None:
    """The server's side. Raises OSError if the other side cannot prove anything."""
    secret, asked = read_secret(file), os.urandom(NONCE)
    peer.sendall(asked)
    own, proof = _exactly(peer, NONCE), _exactly(peer, NONCE)
    if not hmac.compare_digest(proof, digest(secret, b"client", asked, own)):
        raise ConnectionRefusedError("it has another secret")
    peer.sendall(digest(secret, b"server", asked, own))
