"""Encoder outputs that are fetched from other engines, over the connections of blocks.

A connection has one question, `{"engine": facts, "items": [hashes]}`. The answer is `{"refused":
reason}`, or for each item `{"shape": [tokens, width], "dtype": D, "bytes": N}` and N bytes, or
`{"missing": true}`.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from modulm.errors import ConfigError
from modulm_distributed.secret import read_secret, secret_file
from modulm_distributed.tls import TlsContexts, tls_contexts
from modulm_kv_peer.server import TlsServer
from modulm_kv_peer.wire import (
    Deadline,
    Fault,
    differing,
    receive,
    receive_into,
    send,
    set_deadline,
)
from modulm_kv_transfer.block_files import BadFile
from modulm_kv_transfer.encoder_outputs import EncoderTransfer, FileEncoderOutputs

__all__ = ["PeerEncoderOutputs"]

_FLAG = "ec_transfer_config"
#: Requests whose items are fetched at once; others wait, and their time runs.
_FETCHES = 16
#: Seconds in which a peer that failed is not asked again.
_REST = 5.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class PeerEncoderOutputs(FileEncoderOutputs):
    """Outputs in files, which other engines fetch, and files of outputs fetched from `peers`.

    peers: HOST:PORT of engines that produce outputs. secret_file: needed for other hosts than this
    one. seconds: after which a fetch has ended. Raises ConfigError.
    """

    remote: ClassVar[bool] = True

    def __init__(
        self,
        folder: Path,
        most: int,
        transfer: EncoderTransfer,
        *,
        peers: Sequence[str] = (),
        secret_file: str | None = None,
        seconds: float = 10.0,
    ) -> None:
        super().__init__(folder, most, transfer.model)
        self._transfer, self._secret_file, self._seconds = transfer, secret_file, seconds
        self._peers = [_address(peer) for peer in peers]
        self._server: TlsServer | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._fetches: dict[str, Future[None]] = {}
        #: Peer -> when it may be asked again.
        self._resting: dict[tuple[str, int], float] = {}
        self._closed, self._lock_open = threading.Event(), threading.Lock()
        self._open: set[socket.socket] = set()

    def start(self) -> None:
        transfer = self._transfer
        if transfer.produces:
            port = transfer.port + transfer.replica
            tls = self._tls(transfer.host)
            self._server = _Server(self, transfer.facts, tls, transfer.host, port, self._seconds)
        if transfer.consumes and self._peers:
            for host, _ in self._peers:
                self._tls(host)
            self._threads = ThreadPoolExecutor(_FETCHES, "ec-fetches")

    def _tls(self, host: str) -> TlsContexts:
        """Return the contexts for a host. Raises ConfigError without a secret."""
        local = "127.0.0.1" if host in _LOOPBACK else host
        return tls_contexts(read_secret(secret_file(local, self._secret_file, _FLAG), _FLAG))

    def fetch(self, request: str, items: Sequence[bytes]) -> bool:
        if self._threads is None:
            return True
        fetch = self._fetches.get(request)
        if fetch is None:
            missing = [item for item in dict.fromkeys(items) if not self.has(item)]
            if not missing:
                return True
            deadline = Deadline(self._seconds)
            fetch = self._threads.submit(self._fetch, missing, deadline)
            self._fetches[request] = fetch
        return fetch.done()

    def finish(self, request: str) -> None:
        fetch = self._fetches.pop(request, None)
        if fetch is not None:
            fetch.cancel()

    def _fetch(self, missing: list[bytes], deadline: Deadline) -> None:
        """Fetch what peers have; what is still missing then is computed."""
        for peer in self._peers:
            if not missing or self._closed.is_set():
                return
            if time.monotonic() < self._resting.get(peer, 0.0):
                continue
            try:
                missing = self._ask(peer, missing, deadline)
            except (OSError, Fault) as error:
                self._resting[peer] = time.monotonic() + _REST
                self.warn(f"encoder outputs are computed: {peer[0]}:{peer[1]}: {error}")

    def _ask(self, peer: tuple[str, int], items: list[bytes], deadline: Deadline) -> list[bytes]:
        """Fetch items from a peer; return those that it does not have. Raises OSError, Fault."""
        with (
            socket.create_connection(peer, timeout=deadline.left) as plain,
            self._closable(plain),
            self._tls(peer[0]).connect(plain) as secured,
            self._closable(secured),  # `plain` is detached now
        ):
            send(secured, {"engine": self._transfer.facts, "items": items}, deadline)
            return [item for item in items if not self._receive(secured, item, deadline)]

    @contextmanager
    def _closable(self, peer: socket.socket) -> Iterator[None]:
        """Let `close` end the connection. Raises Fault after `close`."""
        with self._lock_open:
            if self._closed.is_set():
                raise Fault("the engine stops")
            self._open.add(peer)
        try:
            yield
        finally:
            with self._lock_open:
                self._open.discard(peer)

    def _receive(self, peer: ssl.SSLSocket, item: bytes, deadline: Deadline) -> bool:
        """Receive an item and store it; whether the peer has it. Raises OSError, Fault."""
        answer = receive(peer, deadline)
        if "refused" in answer:
            raise Fault(f"refused: {answer['refused']}")
        if answer.get("missing") is True:
            return False
        shape, dtype, size = (answer.get(key) for key in ("shape", "dtype", "bytes"))
        if not isinstance(size, int) or not 0 < size <= self._most:
            raise Fault("its answer cannot be read")
        if not isinstance(shape, list) or not isinstance(dtype, str):
            raise Fault("its answer cannot be read")
        payload = bytearray(size)
        receive_into(peer, memoryview(payload), deadline)
        self.write(item, shape, dtype, payload)
        return True

    def close(self) -> None:
        with self._lock_open:
            self._closed.set()
            for peer in self._open:
                with suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None
        if self._server is not None:
            self._server.close()
            self._server = None


class _Server(TlsServer):
    """Gives stored outputs to other engines."""

    def __init__(
        self,
        outputs: FileEncoderOutputs,
        facts: Mapping[str, str],
        tls: TlsContexts,
        host: str,
        port: int,
        seconds: float,
    ) -> None:
        self._outputs, self._facts = outputs, facts
        super().__init__(tls, host, port, seconds, _FLAG, "ec_port")

    def _answer(self, peer: ssl.SSLSocket) -> None:
        deadline = Deadline(self._seconds)
        question = receive(peer, deadline)
        facts, items = question.get("engine"), question.get("items")
        if not isinstance(facts, dict) or not isinstance(items, list):
            raise Fault("the question cannot be read")
        reason = differing(self._facts, facts)
        if reason is not None:
            send(peer, {"refused": reason}, deadline)
            return
        for item in items:
            if not isinstance(item, bytes):
                raise Fault("the question cannot be read")
            found: dict[str, Any] = {"missing": True}
            payload = bytearray()
            with suppress(BadFile, OSError):
                shape, dtype, payload = self._outputs.read(item)
                found = {"shape": list(shape), "dtype": dtype, "bytes": len(payload)}
            send(peer, found, deadline)
            if payload:
                set_deadline(peer, deadline)
                peer.sendall(payload)


def _address(text: str) -> tuple[str, int]:
    """Read HOST:PORT. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(_FLAG, f"peers: {text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)
