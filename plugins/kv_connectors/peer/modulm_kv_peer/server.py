"""Gives blocks to other engines."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from modulm.errors import ConfigError
from modulm_distributed.tls import TlsContexts
from modulm_kv_peer.store import PeerStore
from modulm_kv_peer.wire import Fault, differing, receive, send, set_deadline

__all__ = ["PeerServer"]

log = logging.getLogger("modulm.engine")

#: Connections at once; more are closed.
_MAX_CONNECTIONS = 64
#: Seconds to wait for blocks that are not stored yet: they are on their way to the store.
_GRACE = 5.0


class PeerServer:
    """Listens at host:port and answers each connection in a thread.

    facts: what a peer must have in common. seconds: for one connection, all in all. Raises
    ConfigError if the address cannot be used.
    """

    def __init__(
        self,
        store: PeerStore,
        facts: Mapping[str, str],
        tls: TlsContexts,
        host: str,
        port: int,
        seconds: float,
    ) -> None:
        self._store, self._facts, self._tls, self._seconds = store, facts, tls, seconds
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise ConfigError("kv_transfer_config", f"kv_port: {host}:{port}: {error}") from error
        self._threads: set[threading.Thread] = set()
        self._thread = threading.Thread(target=self._accept, name="kv-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections and threads."""
        self._store.close()
        with self._lock:
            self._closed = True
            sockets = [self._listener, *self._open]
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for thread in list(self._threads):
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._closed or len(self._open) >= _MAX_CONNECTIONS:
                    peer.close()
                    continue
                self._open.add(peer)
                thread = threading.Thread(target=self._serve, args=(peer,), daemon=True)
                self._threads.add(thread)
                thread.start()

    def _serve(self, peer: socket.socket) -> None:
        deadline = time.monotonic() + self._seconds
        try:
            set_deadline(peer, deadline)
            with self._tls.accept(peer) as secured:
                with self._lock:  # `peer` is detached now
                    self._open.discard(peer)
                    self._open.add(secured)
                try:
                    self._answer(secured, deadline)
                finally:
                    with self._lock:
                        self._open.discard(secured)
        except (OSError, Fault) as error:
            log.debug("a KV peer: %s", error)
        finally:
            with self._lock:
                self._open.discard(peer)
                self._threads.discard(threading.current_thread())
            peer.close()

    def _answer(self, peer: ssl.SSLSocket, deadline: float) -> None:
        question = receive(peer, deadline)
        facts, names, seconds = (question.get(key) for key in ("engine", "names", "seconds"))
        if not (
            isinstance(facts, dict)
            and isinstance(names, list)
            and all(isinstance(name, bytes) for name in names)
            and isinstance(seconds, int | float)
        ):
            raise Fault("the question cannot be read")
        reason = differing(self._facts, facts)
        if reason is not None:
            send(peer, {"refused": reason})
            return
        patience = min(deadline, time.monotonic() + min(float(seconds), _GRACE))
        missing = self._store.missing(names, patience)
        if missing:
            send(peer, {"missing": missing})
            return
        send(peer, {"blocks": len(names), "width": self._store.memory.shape[1]})
        for name in names:
            block = self._store.copy(name)
            if block is None:
                raise Fault("a block was evicted")
            set_deadline(peer, deadline)
            peer.sendall(block)
