"""Fetches blocks from other engines."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch

from modulm_distributed.tls import TlsContexts
from modulm_kv_peer.wire import Fault, receive, receive_into, send, set_deadline

__all__ = ["PeerClient"]


class PeerClient:
    """Fetches blocks; any thread may call `fetch`.

    facts: of this engine. width: bytes of a block.
    """

    def __init__(self, facts: Mapping[str, str], tls: TlsContexts, width: int) -> None:
        self._facts, self._tls, self._width = facts, tls, width
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False

    def fetch(self, host: str, port: int, names: Sequence[bytes], deadline: float) -> torch.Tensor:
        """Return the blocks: [blocks, width] uint8. Raises Fault, at the latest at `deadline`."""
        try:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Fault("the time is up")
            with socket.create_connection((host, port), timeout=left) as plain:
                set_deadline(plain, deadline)
                with (
                    self._closable(plain),
                    self._tls.connect(plain) as peer,
                    self._closable(peer),  # `plain` is detached now
                ):
                    return self._ask(peer, names, deadline)
        except (OSError, Fault) as error:
            raise Fault(f"{host}:{port}: {error}") from error

    @contextmanager
    def _closable(self, peer: socket.socket) -> Iterator[None]:
        """Let `close` end the connection. Raises Fault after `close`."""
        with self._lock:
            if self._closed:
                raise Fault("the engine stops")
            self._open.add(peer)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(peer)

    def _ask(self, peer: socket.socket, names: Sequence[bytes], deadline: float) -> torch.Tensor:
        left = max(0.0, deadline - time.monotonic())
        send(peer, {"engine": self._facts, "names": names, "seconds": left})
        answer = receive(peer, deadline)
        if "refused" in answer:
            raise Fault(f"refused: {answer['refused']}")
        if "missing" in answer:
            raise Fault(f"{answer['missing']} of {len(names)} blocks are not there")
        if answer != {"blocks": len(names), "width": self._width}:
            raise Fault("its blocks have another size")
        blocks = torch.empty((len(names), self._width), dtype=torch.uint8)
        receive_into(peer, memoryview(blocks.view(-1).numpy()), deadline)
        return blocks

    def close(self) -> None:
        """End all fetches."""
        with self._lock:
            self._closed = True
            for peer in self._open:
                with suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)
