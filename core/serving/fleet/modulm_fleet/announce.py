"""Replicas on other machines announce themselves to the front end.

A machine without a front end connects to `--data-parallel-address`, sends its installed packages
and its replicas, and is accepted or refused. Replica N listens on the address that this connection
comes from, at the port of announcements + 1 + N. Connections are TLS.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from attrs import frozen

from modulm.errors import ConfigError, EngineDead, EngineError
from modulm_distributed.accepting import accepted
from modulm_distributed.tls import tls_contexts
from modulm_fleet.flags import FleetConfig
from modulm_fleet.secret import keep_alive, read_secret, secret_file
from modulm_wire import frames

if TYPE_CHECKING:
    from collections.abc import Iterable

    from modulm.contracts.config import EngineConfig
    from modulm.plugins.manager import PluginManager
    from modulm_fleet.placement import Placement

__all__ = ["Announcement", "Announcements", "address_of_rank", "announce"]

log = logging.getLogger("modulm.fleet")

#: Maximum bytes of an announcement.
_MAX_BYTES = 4 << 20
#: Seconds in which a machine must send its announcement.
_TIMEOUT = 10.0
#: Seconds between two attempts to reach the front end, and between two log lines about it.
_RETRY, _LOG_INTERVAL = 1.0, 15.0


@frozen
class Announcement:
    """What a machine announces: its version of modulm, its plugins and its replicas.

    installed: (distribution, version, kind/name, target) of each plugin. size: replicas of all
    machines. ranks: those of this machine.
    """

    version: str
    installed: frozenset[tuple[str, ...]]
    size: int
    ranks: range

    @classmethod
    def of(cls, config: EngineConfig, placement: Placement, plugins: PluginManager) -> Announcement:
        """Create this machine's announcement."""
        installed = frozenset(plugins.snapshot().installed)
        size = config.parallel.data_parallel_size
        return cls(version("modulm"), installed, size, placement.here)

    def pack(self) -> list[Any]:
        """Pack into plain values of a frame."""
        return [self.version, sorted(self.installed), self.size, self.ranks.start, self.ranks.stop]

    @classmethod
    def unpack(cls, packed: list[Any]) -> Announcement:
        """Unpack from plain values of a frame."""
        release, installed, size, start, stop = packed
        return cls(release, frozenset(map(tuple, installed)), size, range(start, stop))

    def refuses(self, other: Announcement, elsewhere: range) -> str | None:
        """Why replicas of another machine do not fit; None if they do."""
        if other.version != self.version:
            return f"modulm is {other.version} there and {self.version} here"
        differing = sorted({entry[0] for entry in self.installed ^ other.installed})
        if differing:
            return f"other plugins there than here: {', '.join(differing)} differ"
        if other.size != self.size:
            return f"--data-parallel-size is {other.size} there and {self.size} here"
        if not (elsewhere.start <= other.ranks.start and other.ranks.stop <= elsewhere.stop):
            return (
                f"replicas {other.ranks.start} to {other.ranks.stop - 1} are there, and "
                f"{elsewhere.start} to {elsewhere.stop - 1} are missing here"
            )
        return None


def address_of_rank(host: str, port: int, rank: int) -> str:
    """HOST:PORT of a replica on another machine. port: of announcements."""
    return f"[{host}]:{port + 1 + rank}" if ":" in host else f"{host}:{port + 1 + rank}"


class Announcements:
    """Accepts announcements on a thread, for as long as the front end serves.

    secret_file: the file with the secret that announcing machines and their replicas share.
    """

    def __init__(self, config: EngineConfig, placement: Placement, plugins: PluginManager) -> None:
        host, self._port = placement.address
        self.secret_file = secret_file(host, config.group(FleetConfig).data_parallel_secret_file)
        self._tls = tls_contexts(read_secret(self.secret_file))
        self._local = Announcement.of(config, placement, plugins)
        self._elsewhere = placement.elsewhere
        self._hosts: dict[int, str] = {}
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._listener = _bound(host, self._port)
        self._listener.listen(16)
        thread = threading.Thread(target=self._serve, name="modulm-announced", daemon=True)
        thread.start()

    def wait(self) -> list[tuple[int, str]]:
        """The number and the address of each replica of other machines, once all are known."""
        with self._changed:
            while missing := [rank for rank in self._elsewhere if rank not in self._hosts]:
                ranks = ", ".join(map(str, missing))
                log.warning("waiting for replicas %s to announce themselves at port %d", ranks,
                            self._port)  # fmt: skip
                self._changed.wait(_LOG_INTERVAL)
            return [
                (rank, address_of_rank(self._hosts[rank], self._port, rank))
                for rank in self._elsewhere
            ]

    def close(self) -> None:
        """Stop accepting announcements."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        for peer in accepted(self._listener, self._closed):
            try:
                threading.Thread(target=self._receive, args=(peer,), daemon=True).start()
            except RuntimeError as error:  # no room for a thread; the machine tries again
                log.error("an announcement cannot be read: %s", error)
                peer.close()

    def _receive(self, stranger: socket.socket) -> None:
        """Handle one machine's announcement. Runs on a thread until the machine disconnects."""
        host = "an unknown address"
        try:
            host = stranger.getpeername()[0]
            stranger.settimeout(_TIMEOUT)
            keep_alive(stranger)
            with stranger, self._tls.accept(stranger) as peer:
                announcement = Announcement.unpack(_read_frame(peer)[1])
                reason = self._local.refuses(announcement, self._elsewhere)
                peer.sendall(frames.pack("answer", reason))
                if reason is not None:
                    log.error("replicas on %s are refused: %s", host, reason)
                    return
                self._add(host, announcement.ranks)
                peer.settimeout(None)
                peer.recv(1)
        except Exception as error:
            log.error("announcement from %s failed: %s", host, error)
        finally:
            stranger.close()

    def _add(self, host: str, ranks: Iterable[int]) -> None:
        with self._changed:
            self._hosts.update(dict.fromkeys(ranks, host))
            self._changed.notify_all()


def announce(config: EngineConfig, placement: Placement, plugins: PluginManager) -> socket.socket:
    """Announce this machine's replicas to the front end, waiting until there is one.

    Returns the connection: replicas listen on its own address (`getsockname`), and it ends with the
    front end. Raises EngineError if the front end refuses the replicas, ConfigError for a secret
    that cannot be used.
    """
    host, port = placement.address
    file = secret_file(host, config.group(FleetConfig).data_parallel_secret_file)
    contexts = tls_contexts(read_secret(file))
    packed = frames.pack("join", Announcement.of(config, placement, plugins).pack())
    logged = -_LOG_INTERVAL
    while True:
        try:
            plain = socket.create_connection((host, port), _TIMEOUT)
        except OSError as error:
            if time.monotonic() - logged > _LOG_INTERVAL:
                log.warning("waiting for the front end at %s:%d (%s)", host, port, error)
                logged = time.monotonic()
            time.sleep(_RETRY)
            continue
        try:
            keep_alive(plain)
            peer = contexts.connect(plain)
        except OSError as error:
            plain.close()
            raise EngineDead(f"the front end at {host}:{port}: {error}") from error
        try:
            peer.sendall(packed)
            _, reason = _read_frame(peer)
        except OSError as error:
            peer.close()
            raise EngineDead(f"the front end at {host}:{port}: {error}") from error
        if reason is not None:
            peer.close()
            raise EngineError(f"the front end at {host}:{port} refuses these replicas: {reason}")
        peer.settimeout(None)
        return peer


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            "data_parallel_address", f"{host}:{port} cannot be listened on: {error.strerror}"
        ) from error
    return listener


def _read_frame(peer: socket.socket) -> list[Any]:
    """The next frame. Raises OSError at the end of the stream."""
    with peer.makefile("rb") as stream:
        size = int.from_bytes(stream.read(4), "big")
        body = stream.read(size) if 0 < size < _MAX_BYTES else b""
    if not body:
        raise ConnectionResetError("the connection ended without an answer")
    return frames.unpack(body)
