"""Blocks of other engines through NIXL (NVIDIA Inference Xfer Library), an optional package.

A producer registers the memory of its store. A consumer reads slots of it into memory of its own
while the connection says which slots, as it does for shared memory. Source: NIXL's Python API.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

import torch

from modulm.errors import ConfigError
from modulm.plugins.index import to_install
from modulm_kv_peer.wire import Deadline, Fault

__all__ = ["NixlAgent"]

#: Blocks that are read at once into one buffer.
_ROWS = 16
#: Peers whose connections are kept; the one used the longest ago is closed.
_PEERS = 64
#: Seconds between two looks at a transfer.
_POLL = 0.0005


class NixlAgent:
    """An agent of this process. Thread-safe.

    backends: NIXL's names, such as UCX. Raises ConfigError if the package is missing or cannot
    use them.
    """

    def __init__(self, backends: Sequence[str]) -> None:
        try:
            api = importlib.import_module("nixl._api")
        except ImportError as error:
            message = f"backends: the package nixl cannot be imported ({error})"
            hint = to_install("modulm-kv-peer[nixl]")
            raise ConfigError("kv_transfer_config", message + hint) from error
        name = f"modulm-{os.getpid()}-{uuid.uuid4().hex}"
        try:
            config = api.nixl_agent_config(backends=list(backends))
            self._agent: Any = api.nixl_agent(name, config)
        except Exception as error:
            message = f"backends: NIXL cannot use {', '.join(backends)}: {error}"
            raise ConfigError("kv_transfer_config", message) from error
        self._lock = threading.Lock()
        self._registered: list[Any] = []
        self._described: Mapping[str, Any] | None = None
        #: Metadata of a peer's agent -> its name here, least recently used first.
        self._peers: OrderedDict[bytes, str] = OrderedDict()
        #: Width -> registered memory that no fetch uses, [_ROWS, width].
        self._buffers: dict[int, list[torch.Tensor]] = {}

    def register(self, blocks: torch.Tensor) -> None:
        """Let peers read the blocks of a store: [slots, width] uint8."""
        with self._lock:
            self._registered.append(self._agent.register_memory([blocks]))
            metadata = self._agent.get_agent_metadata()
            place = {"address": blocks.data_ptr(), "slots": len(blocks)}
            self._described = {**place, "metadata": metadata}

    def describe(self) -> Mapping[str, Any] | None:
        """Return what `reader` needs of a producer's agent; None if it has registered nothing."""
        return self._described

    def reader(self, described: Mapping[str, Any], width: int) -> _Reader:
        """Return what reads blocks of `width` bytes from a peer. Raises Fault."""
        metadata, address, slots = (described.get(key) for key in ("metadata", "address", "slots"))
        if not isinstance(metadata, bytes) or not isinstance(address, int):
            raise Fault("its answer cannot be read")
        if not isinstance(slots, int):
            raise Fault("its answer cannot be read")
        with self._lock:
            try:
                if metadata not in self._peers:
                    self._peers[metadata] = self._agent.add_remote_agent(metadata)
            except Exception as error:
                raise Fault(f"NIXL cannot reach it: {error}") from error
            self._peers.move_to_end(metadata)
            name = self._peers[metadata]
            if len(self._peers) > _PEERS:
                _, oldest = self._peers.popitem(last=False)
                with suppress(Exception):  # it is reading, or gone
                    self._agent.remove_remote_agent(oldest)
        return _Reader(self, metadata, name, address, slots, width)

    def forget(self, metadata: bytes) -> None:
        """Close the connection to a peer that failed."""
        with self._lock:
            name = self._peers.pop(metadata, None)
            if name is not None:
                with suppress(Exception):
                    self._agent.remove_remote_agent(name)

    def borrow(self, width: int) -> torch.Tensor:
        """Return registered memory: [_ROWS, width] uint8. It is `give_back`'s afterwards."""
        with self._lock:
            free = self._buffers.setdefault(width, [])
            if free:
                return free.pop()
            buffer = torch.empty((_ROWS, width), dtype=torch.uint8)
            self._registered.append(self._agent.register_memory([buffer]))
            return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return memory that no transfer writes to."""
        with self._lock:
            self._buffers[buffer.shape[1]].append(buffer)

    def read(self, peer: str, places: Sequence[tuple[int, int, int]], deadline: Deadline) -> None:
        """Copy memory. places: (address here, address there, bytes). Raises Fault."""
        with self._lock:
            here = self._agent.get_xfer_descs([(at, size, 0) for at, _, size in places], "DRAM")
            there = self._agent.get_xfer_descs([(at, size, 0) for _, at, size in places], "DRAM")
            handle = self._agent.initialize_xfer("READ", here, there, peer)
        try:
            with self._lock:
                state = self._agent.transfer(handle)
            while state == "PROC":
                time.sleep(min(_POLL, deadline.left))
                with self._lock:
                    state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise Fault(f"NIXL: the state of a transfer is {state}")
        finally:
            with self._lock, suppress(Exception):  # it is still running: NIXL aborts it
                self._agent.release_xfer_handle(handle)

    def close(self) -> None:
        """Close all connections, and let go of registered memory."""
        with self._lock:
            for name in self._peers.values():
                with suppress(Exception):
                    self._agent.remove_remote_agent(name)
            for registered in self._registered:
                with suppress(Exception):
                    self._agent.deregister_memory(registered)
            self._peers.clear()
            self._registered.clear()
            self._buffers.clear()
            self._described = None


class _Reader:
    """Reads blocks of one peer. A context: `with` returns its memory at the end."""

    def __init__(
        self, agent: NixlAgent, metadata: bytes, peer: str, address: int, slots: int, width: int
    ) -> None:
        self._agent, self._metadata, self._peer = agent, metadata, peer
        self._address, self._slots, self._width = address, slots, width
        self._buffer = agent.borrow(width)
        self._usable = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._usable:
            self._agent.give_back(self._buffer)

    def __len__(self) -> int:
        return self._slots

    def rows(
        self, slots: Sequence[int], spans: Sequence[tuple[int, int]], deadline: Deadline
    ) -> list[torch.Tensor]:
        """Return the first blocks of these slots, at most `_ROWS`, valid until the next call.

        spans: (start, end) of the bytes to read of each. Raises Fault.
        """
        rows = list(self._buffer[: len(slots)])
        places = [
            (row.data_ptr() + start, self._address + slot * self._width + start, end - start)
            for row, slot in zip(rows, slots, strict=False)
            for start, end in spans
        ]
        try:
            self._agent.read(self._peer, places, deadline)
        except Exception as error:
            # A transfer may still write into the buffer.
            self._usable = False
            self._agent.forget(self._metadata)
            raise error if isinstance(error, Fault) else Fault(f"NIXL: {error}") from error
        return rows
