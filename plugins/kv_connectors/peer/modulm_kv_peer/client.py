"""Fetches blocks from other engines."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import torch

from modulm_distributed.tls import TlsContexts
from modulm_kv_peer.layout import Layout
from modulm_kv_peer.memory import open_shared
from modulm_kv_peer.wire import Deadline, Fault, receive, receive_into, send

__all__ = ["Opener", "PeerClient", "Writer"]

#: Takes blocks: the index of the first one, and the bytes of each.
Writer: TypeAlias = Callable[[int, Sequence[torch.Tensor]], None]
#: Makes a writer for blocks of a layout, from an engine of a tensor parallel size; None: none of
#: them are needed.
Opener: TypeAlias = Callable[[Layout, int], Writer | None]


class PeerClient:
    """Fetches blocks; any thread may call `fetch`.

    facts: of this engine. shared: whether to read shared memory if a peer offers it.
    """

    def __init__(self, facts: Mapping[str, str], tls: TlsContexts, *, shared: bool) -> None:
        self._facts, self._tls, self._shared = facts, tls, shared
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False

    def fetch(
        self, host: str, port: int, names: Sequence[bytes], deadline: Deadline, opener: Opener
    ) -> None:
        """Write the blocks, in parts. Raises Fault, at the latest at the deadline."""
        try:
            with (
                socket.create_connection((host, port), timeout=deadline.left) as plain,
                self._closable(plain),
                self._tls.connect(plain) as peer,
                self._closable(peer),  # `plain` is detached now
            ):
                self._ask(peer, names, deadline, opener)
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

    def _ask(
        self, peer: socket.socket, names: Sequence[bytes], deadline: Deadline, opener: Opener
    ) -> None:
        question = {
            "engine": self._facts, "names": names, "seconds": deadline.left,
            "computing": deadline.renewed, "shared": self._shared,
        }  # fmt: skip
        send(peer, question, deadline)
        answer = receive(peer, deadline)
        if "refused" in answer:
            raise Fault(f"refused: {answer['refused']}")
        size = answer.get("tensor_parallel_size")
        if answer.get("blocks") != len(names) or not isinstance(size, int):
            raise Fault("its answer cannot be read")
        layout = Layout.unpacked(answer.get("tensors"))
        write = opener(layout, size)
        if write is None:
            return
        memory = None
        if isinstance(answer.get("memory"), dict):
            memory = open_shared(answer["memory"], layout.width)
            send(peer, {"shared": memory is not None}, deadline)
        count = 0
        while count < len(names):
            part = receive(peer, deadline)
            if "missing" in part:
                raise Fault(f"{part['missing']} of {len(names)} blocks are not there")
            rows = _rows(peer, part, len(names) - count, layout.width, memory, deadline)
            write(count, rows)
            if memory is not None:
                send(peer, {"copied": len(rows)}, deadline)
            count += len(rows)
            deadline.renew()
        # The blocks in shared memory were not overwritten meanwhile.
        if receive(peer, deadline) != {"complete": True}:
            raise Fault("its answer cannot be read")

    def close(self) -> None:
        """End all fetches."""
        with self._lock:
            self._closed = True
            for peer in self._open:
                with suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)


def _rows(
    peer: socket.socket,
    part: Mapping[str, Any],
    most: int,
    width: int,
    memory: torch.Tensor | None,
    deadline: Deadline,
) -> list[torch.Tensor]:
    """Return the blocks of a part, at least one: a uint8 tensor [width] of each. Raises Fault."""
    if memory is not None:
        slots = part.get("slots")
        if not isinstance(slots, list) or not 0 < len(slots) <= most:
            raise Fault("its answer cannot be read")
        if not all(isinstance(slot, int) and 0 <= slot < len(memory) for slot in slots):
            raise Fault("its answer cannot be read")
        return [memory[slot] for slot in slots]
    count = part.get("blocks")
    if not isinstance(count, int) or not 0 < count <= most:
        raise Fault("its answer cannot be read")
    blocks = torch.empty((count, width), dtype=torch.uint8)
    receive_into(peer, memoryview(blocks.view(-1).numpy()), deadline)
    return list(blocks)
