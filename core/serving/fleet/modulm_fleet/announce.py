"""How replicas of other machines come to a front end: they announce where they are.

A machine without a front end connects to the address that all were given, says what is installed
there and which replicas it has, and is told whether they fit. Replica N listens on the address
that this connection comes from, at the port N + 1 above the one of announcements.
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
from modulm.wire import frames
from modulm_fleet.flags import FleetConfig
from modulm_fleet.secret import admit, check_secret, keep_alive, prove

if TYPE_CHECKING:
    from collections.abc import Iterable

    from modulm.config import EngineConfig
    from modulm.plugins.manager import PluginManager
    from modulm_fleet.placement import Placement

__all__ = ["Announcement", "Announcements", "address_of_rank", "announce"]

log = logging.getLogger("modulm.fleet")

#: Bytes that an announcement may have.
_LONGEST = 4 << 20
#: Seconds in which a machine must say what it has.
_TALK = 10.0
#: Seconds between two tries to reach the front end, and between two lines that say so.
_AGAIN, _SAY = 1.0, 15.0


@frozen
class Announcement:
    """What a machine has. installed: (distribution, version, kind/name, target) of all plugins."""

    version: str
    installed: frozenset[tuple[str, ...]]
    size: int
    ranks: range

    @classmethod
    def of(cls, config: EngineConfig, placed: Placement, plugins: PluginManager) -> Announcement:
        """This machine's."""
        installed = frozenset(plugins.snapshot().installed)
        size = config.parallel.data_parallel_size
        return cls(version("modulm"), installed, size, placed.here)

    def pack(self) -> list[Any]:
        """As a frame's plain values."""
        return [self.version, sorted(self.installed), self.size, self.ranks.start, self.ranks.stop]

    @classmethod
    def unpack(cls, packed: list[Any]) -> Announcement:
        """What was packed."""
        known, installed, size, start, stop = packed
        return cls(known, frozenset(map(tuple, installed)), size, range(start, stop))

    def refuses(self, other: Announcement, elsewhere: range) -> str | None:
        """Why replicas of another machine do not fit, by name; None if they do."""
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
    """Where a replica of another machine listens. port: that of announcements."""
    return f"[{host}]:{port + 1 + rank}" if ":" in host else f"{host}:{port + 1 + rank}"


class Announcements:
    """Takes announcements, on a thread, for as long as the front end serves."""

    def __init__(self, config: EngineConfig, placed: Placement, plugins: PluginManager) -> None:
        self._secret = config.group(FleetConfig).data_parallel_secret_file
        host, self._port = placed.address
        check_secret(host, self._secret)
        self._own = Announcement.of(config, placed, plugins)
        self._elsewhere = placed.elsewhere
        self._hosts: dict[int, str] = {}
        self._changed = threading.Condition()
        self._listener = _bound(host, self._port)
        self._listener.listen(16)
        thread = threading.Thread(target=self._serve, name="modulm-announced", daemon=True)
        thread.start()

    def wait(self) -> list[tuple[int, str]]:
        """The number and the address of each replica of other machines, once all are known."""
        with self._changed:
            while missing := [rank for rank in self._elsewhere if rank not in self._hosts]:
                words = ", ".join(map(str, missing))
                log.warning("waiting for replicas %s, port %d here", words, self._port)
                self._changed.wait(_SAY)
            return [
                (rank, address_of_rank(self._hosts[rank], self._port, rank))
                for rank in self._elsewhere
            ]

    def close(self) -> None:
        """Take no more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                threading.Thread(target=self._talk, args=(peer,), daemon=True).start()

    def _talk(self, peer: socket.socket) -> None:
        """One machine's announcement; the body of a thread, which lasts as long as it is there."""
        host = peer.getpeername()[0]
        try:
            with peer:
                peer.settimeout(_TALK)
                keep_alive(peer)
                admit(peer, self._secret)
                found = Announcement.unpack(_receive(peer)[1])
                reason = self._own.refuses(found, self._elsewhere)
                peer.sendall(frames.pack("told", reason))
                if reason is not None:
                    log.error("%s is refused: %s", host, reason)
                    return
                self._take(host, found.ranks)
                peer.settimeout(None)
                peer.recv(1)  # until it is gone
        except Exception as error:
            log.error("%s announced nothing: %s", host, error)

    def _take(self, host: str, ranks: Iterable[int]) -> None:
        with self._changed:
            self._hosts.update(dict.fromkeys(ranks, host))
            self._changed.notify_all()


def announce(config: EngineConfig, placed: Placement, plugins: PluginManager) -> socket.socket:
    """Tell the front end of this machine's replicas: the connection, which says where they listen
    (`getsockname`) and ends with the front end. Waits until there is one.

    Raises EngineError if it refuses them, ConfigError for a secret that cannot be used.
    """
    secret = config.group(FleetConfig).data_parallel_secret_file
    host, port = placed.address
    check_secret(host, secret)
    packed = frames.pack("join", Announcement.of(config, placed, plugins).pack())
    said = -_SAY
    while True:
        try:
            peer = socket.create_connection((host, port), _TALK)
        except OSError as error:
            if time.monotonic() - said > _SAY:
                log.warning("waiting for the front end at %s:%d (%s)", host, port, error)
                said = time.monotonic()
            time.sleep(_AGAIN)
            continue
        try:
            keep_alive(peer)
            prove(peer, secret)
            peer.sendall(packed)
            _, reason = _receive(peer)
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


def _receive(peer: socket.socket) -> list[Any]:
    """A frame. Raises OSError at the end of the stream."""
    with peer.makefile("rb") as stream:
        size = int.from_bytes(stream.read(4), "big")
        body = stream.read(size) if 0 < size < _LONGEST else b""
    if not body:
        raise ConnectionResetError("nothing was said")
    return frames.unpack(body)
