"""Fetches blocks from other engines."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeAlias

import torch

from modulm_distributed.tls import TlsContexts
from modulm_kv_peer.layout import Layout
from modulm_kv_peer.memory import open_shared
from modulm_kv_peer.nixl import NixlAgent
from modulm_kv_peer.wire import Deadline, Fault, receive, receive_into, send

__all__ = ["Opener", "PeerClient", "Writer"]

#: Takes blocks: the index of the first one, the bytes of each, and which tensors these have; None:
#: all.
Writer: TypeAlias = Callable[[int, Sequence[torch.Tensor], Sequence[int] | None], None]
#: Makes a writer for blocks of a layout, from an engine of a tensor parallel size; None: none of
#: them are needed.
Opener: TypeAlias = Callable[[Layout, int], Writer | None]
#: (start, end) of bytes of a block.
_Spans: TypeAlias = Sequence[tuple[int, int]]
#: A peer's memory: its slots, and what returns the first blocks of some of them, with these bytes.
_Memory: TypeAlias = tuple[int, Callable[[Sequence[int], _Spans, Deadline], list[torch.Tensor]]]
#: Blocks that are received at once.
_PART = 16


class PeerClient:
    """Fetches blocks; any thread may call `fetch`.

    facts: of this engine. shared: whether to read shared memory if a peer offers it. agent: NIXL's,
    to read the memory of other peers.
    """

    def __init__(
        self,
        facts: Mapping[str, str],
        tls: TlsContexts,
        *,
        shared: bool,
        agent: NixlAgent | None = None,
    ) -> None:
        self._facts, self._tls, self._shared, self._agent = facts, tls, shared, agent
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
            "computing": deadline.renewed, "shared": self._shared, "nixl": self._agent is not None,
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
        with ExitStack() as stack:
            memory = self._memory(answer, layout.width, stack)
            if isinstance(answer.get("memory"), dict) or isinstance(answer.get("nixl"), dict):
                send(peer, {"slots": memory is not None}, deadline)
            self._receive(peer, len(names), layout, memory, write, deadline)

    def _memory(self, answer: Mapping[str, Any], width: int, stack: ExitStack) -> _Memory | None:
        """Return how to read the peer's memory, or None. Raises Fault."""
        if isinstance(answer.get("memory"), dict):
            blocks = open_shared(answer["memory"], width)
            if blocks is not None:
                return len(blocks), lambda slots, *_: [blocks[slot] for slot in slots]
        if self._agent is not None and isinstance(answer.get("nixl"), dict):
            reader = stack.enter_context(self._agent.reader(answer["nixl"], width))
            return len(reader), reader.rows
        return None

    def _receive(
        self,
        peer: socket.socket,
        total: int,
        layout: Layout,
        memory: _Memory | None,
        write: Writer,
        deadline: Deadline,
    ) -> None:
        """Write `total` blocks as they arrive, whole or some tensors at a time. Raises Fault."""
        count, came = 0, set[int]()
        while count < total:
            part = receive(peer, deadline)
            if "missing" in part:
                raise Fault(f"{part['missing']} of {total} blocks are not there")
            tensors = _tensors(part, layout)
            spans = layout.spans(tensors)
            slots = None if memory is None else _slots(part, total - count, memory[0])
            done, blocks = 0, _blocks(part, total - count) if slots is None else len(slots)
            while done < blocks:
                if memory is None or slots is None:
                    rows = _rows(peer, min(blocks - done, _PART), layout.width, spans, deadline)
                else:
                    rows = memory[1](slots[done:], spans, deadline)
                write(count + done, rows, tensors)
                done += len(rows)
            if slots is not None:
                send(peer, {"copied": blocks}, deadline)
            came.update(range(len(layout.tensors)) if tensors is None else tensors)
            if len(came) == len(layout.tensors):
                count, came = count + blocks, set()
            deadline.renew()
        # The blocks in the peer's memory were not overwritten meanwhile.
        if receive(peer, deadline) != {"complete": True}:
            raise Fault("its answer cannot be read")

    def close(self) -> None:
        """End all fetches."""
        with self._lock:
            self._closed = True
            for peer in self._open:
                with suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)


def _tensors(part: Mapping[str, Any], layout: Layout) -> list[int] | None:
    """Return the tensors that a part has of its blocks, in order; None: all. Raises Fault."""
    listed = part.get("tensors")
    if listed is None:
        return None
    known = range(len(layout.tensors))
    if not isinstance(listed, list) or not listed or any(index not in known for index in listed):
        raise Fault("its answer cannot be read")
    return listed


def _slots(part: Mapping[str, Any], most: int, slots: int) -> list[int]:
    """Return the slots of a part, at least one. Raises Fault."""
    listed = part.get("slots")
    if not isinstance(listed, list) or not 0 < len(listed) <= most:
        raise Fault("its answer cannot be read")
    if not all(isinstance(slot, int) and 0 <= slot < slots for slot in listed):
        raise Fault("its answer cannot be read")
    return listed


def _blocks(part: Mapping[str, Any], most: int) -> int:
    """Return the number of blocks of a part, at least one. Raises Fault."""
    count = part.get("blocks")
    if not isinstance(count, int) or not 0 < count <= most:
        raise Fault("its answer cannot be read")
    return count


def _rows(
    peer: socket.socket, count: int, width: int, spans: _Spans, deadline: Deadline
) -> list[torch.Tensor]:
    """Receive blocks: a uint8 tensor [width] of each, with the bytes of these spans. Raises
    OSError, Fault.
    """
    blocks = torch.empty((count, width), dtype=torch.uint8)
    if spans == [(0, width)]:
        receive_into(peer, memoryview(blocks.view(-1).numpy()), deadline)
        return list(blocks)
    for block in blocks:
        for start, end in spans:
            receive_into(peer, memoryview(block[start:end].numpy()), deadline)
    return list(blocks)
