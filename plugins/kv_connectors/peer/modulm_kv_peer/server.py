"""Gives blocks to other engines."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress

from modulm.errors import ConfigError
from modulm_distributed.accepting import accepted
from modulm_distributed.tls import TlsContexts
from modulm_kv_peer.layout import Layout
from modulm_kv_peer.memory import SharedMemory
from modulm_kv_peer.nixl import NixlAgent
from modulm_kv_peer.store import Filling, PeerStore
from modulm_kv_peer.wire import Deadline, Fault, differing, receive, send, set_deadline

__all__ = ["PeerServer", "TlsServer"]

log = logging.getLogger("modulm.engine")

#: Connections at once; more are closed.
_MAX_CONNECTIONS = 64
#: Seconds to wait for blocks that are not stored yet: they are on their way to the store.
_GRACE = 5.0
#: Stored blocks that are sent as one part.
_PART = 16


class TlsServer(ABC):
    """Listens at host:port and answers each connection in a thread.

    seconds: for the handshake. flag, key: where the port is set, for messages. Raises ConfigError
    if the address cannot be used.
    """

    def __init__(
        self, tls: TlsContexts, host: str, port: int, seconds: float, flag: str, key: str
    ) -> None:
        self._tls, self._seconds = tls, seconds
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed, self._ending = False, threading.Event()
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise ConfigError(flag, f"{key}: {host}:{port}: {error}") from error
        self._threads: set[threading.Thread] = set()
        self._thread = threading.Thread(target=self._accept, name="kv-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections and threads."""
        with self._lock:
            self._closed = True
            self._ending.set()
            sockets = [self._listener, *self._open]
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for thread in list(self._threads):
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        for peer in accepted(self._listener, self._ending):
            with self._lock:
                if self._closed or len(self._open) >= _MAX_CONNECTIONS:
                    peer.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(peer,), daemon=True)
                try:
                    self._open.add(peer)
                    self._threads.add(thread)
                    thread.start()
                except RuntimeError as error:  # no room for a thread; the peer computes the prompt
                    log.warning("a KV peer is refused: %s", error)
                    self._open.discard(peer)
                    self._threads.discard(thread)
                    peer.close()

    def _serve(self, peer: socket.socket) -> None:
        try:
            set_deadline(peer, Deadline(self._seconds))
            with self._tls.accept(peer) as secured:
                with self._lock:  # `peer` is detached now
                    self._open.discard(peer)
                    self._open.add(secured)
                try:
                    self._answer(secured)
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

    @abstractmethod
    def _answer(self, peer: ssl.SSLSocket) -> None:
        """Answer a connection. Raises OSError, Fault."""


class PeerServer(TlsServer):
    """Gives the blocks of a store to other engines.

    facts: what a peer must have in common. size: tensor parallel size. memory: the store's, if it
    is shared. seconds: for one connection, or for each part of blocks that are being computed.
    agent: NIXL's, with the store registered. Raises ConfigError if the address cannot be used.
    """

    def __init__(
        self,
        store: PeerStore,
        layout: Layout,
        size: int,
        memory: SharedMemory | None,
        facts: Mapping[str, str],
        tls: TlsContexts,
        host: str,
        port: int,
        seconds: float,
        agent: NixlAgent | None = None,
    ) -> None:
        self._store, self._facts, self._agent = store, facts, agent
        self._layout, self._size, self._memory = layout, size, memory
        super().__init__(tls, host, port, seconds, "kv_transfer_config", "kv_port")

    def close(self) -> None:
        self._store.close()
        super().close()

    def _answer(self, peer: ssl.SSLSocket) -> None:
        deadline = Deadline(self._seconds)
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
            send(peer, {"refused": reason}, deadline)
            return
        computing = question.get("computing") is True
        deadline = Deadline(self._seconds, renewed=computing)
        memory = agent = None
        if self._memory is not None and question.get("shared") is True:
            memory = self._memory.describe()
        if self._agent is not None and question.get("nixl") is True:
            agent = self._agent.describe()
        answer = {
            "blocks": len(names),
            "tensors": self._layout.tensors,
            "tensor_parallel_size": self._size,
            "memory": memory,
            "nixl": agent,
        }
        send(peer, answer, deadline)
        shared = False
        if memory is not None or agent is not None:
            shared = receive(peer, deadline).get("slots") is True
        patience = min(float(seconds), self._seconds if computing else _GRACE)
        self._send_blocks(peer, names, patience, deadline, shared=shared)

    def _send_blocks(
        self,
        peer: ssl.SSLSocket,
        names: list[bytes],
        patience: float,
        deadline: Deadline,
        *,
        shared: bool,
    ) -> None:
        """Send blocks as they are stored. patience: seconds to wait for the next one."""
        count = 0
        while count < len(names):
            left = names[count:]
            slots, filling = self._store.hold(left, min(patience, deadline.left), _PART)
            try:
                whole = bool(slots)
                if filling is not None:
                    whole = self._send_layers(
                        peer, slots, filling, patience, deadline, shared=shared
                    )
                elif slots:
                    self._send_part(peer, slots, None, deadline, shared=shared)
            finally:
                self._store.drop(slots)
            if not whole:
                send(peer, {"missing": len(names) - count}, deadline)
                return
            count += len(slots)
        send(peer, {"complete": True}, deadline)

    def _send_layers(
        self,
        peer: ssl.SSLSocket,
        slots: list[int],
        filling: Filling,
        patience: float,
        deadline: Deadline,
        *,
        shared: bool,
    ) -> bool:
        """Send blocks layer by layer, as they are computed. False: their step has failed."""
        sent = 0
        while True:
            tensors = self._store.more(filling, sent, min(patience, deadline.left))
            if not tensors:
                return tensors is not None
            self._send_part(peer, slots, sorted(tensors), deadline, shared=shared)
            sent += len(tensors)

    def _send_part(
        self,
        peer: ssl.SSLSocket,
        slots: list[int],
        tensors: list[int] | None,
        deadline: Deadline,
        *,
        shared: bool,
    ) -> None:
        """Send blocks, or some tensors of them."""
        deadline.renew()
        which = {} if tensors is None else {"tensors": tensors}
        if shared:
            send(peer, {"slots": slots, **which}, deadline)
            if receive(peer, deadline) != {"copied": len(slots)}:
                raise Fault("the answer cannot be read")
            return
        send(peer, {"blocks": len(slots), **which}, deadline)
        spans = self._layout.spans(tensors)
        for slot in slots:
            for start, end in spans:
                set_deadline(peer, deadline)
                peer.sendall(self._store.memory[slot, start:end].numpy())
