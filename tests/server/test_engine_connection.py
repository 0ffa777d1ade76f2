"""Faults of the connection between a front end and an engine's process: short reads and writes, an
engine that does not read, resets, half frames. The engine is played by the test.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import pytest

from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import EngineDead
from modulm_server.engine import codec
from modulm_server.engine.adapters import Adapter
from modulm_server.engine.client import EngineRestarting
from modulm_server.engine.process_client import ProcessCoreClient
from modulm_server.engine.replicas import ReplicaSet
from modulm_server.scripted import scripted_info
from modulm_weight_transfer.engine import WeightState
from modulm_wire import frames


class Link:
    """A front end's client, and the engine's side of its connection."""

    def __init__(self, tokenizer: Tokenizer, path: Path) -> None:
        self.deaths: list[EngineDead] = []
        self.died = threading.Event()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen(1)
            greeting = threading.Thread(target=self._greet, args=(listener, tokenizer))
            greeting.start()
            self.client = self.connect(str(path))
            greeting.join()

    def connect(self, path: str) -> ProcessCoreClient:
        return ProcessCoreClient(path, lambda events: None, self._note)

    def _note(self, death: EngineDead) -> None:
        self.deaths.append(death)
        self.died.set()

    def _greet(self, listener: socket.socket, tokenizer: Tokenizer) -> None:
        self.engine, _ = listener.accept()
        assert self.read() == ["hello"]
        info = codec.pack_info(scripted_info(tokenizer))
        self.engine.sendall(frames.pack("info", 0, info, [], attrs.asdict(WeightState())))

    def read(self, piece: int = 1 << 16) -> list[Any]:
        """Read a frame, at most `piece` bytes at a time."""
        data = bytearray()
        while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
            missing = 4 + int.from_bytes(data[:4], "big") - len(data) if len(data) >= 4 else 1
            data += self.engine.recv(min(piece, missing))
        return frames.unpack(data[4:])


@pytest.fixture
def link(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Link]:
    link = Link(tokenizer, tmp_path / "engine")
    yield link
    link.client.close()
    link.engine.close()


def test_an_answer_that_comes_a_byte_at_a_time(link: Link) -> None:
    answer = link.client.is_sleeping()
    operation, number, *_ = link.read(1)
    assert operation == "is_sleeping"
    for byte in frames.pack("answer", number, True, None):
        link.engine.sendall(bytes([byte]))
    assert answer.result(300) is True
    assert not link.deaths


def test_an_engine_that_does_not_read_holds_nobody(link: Link) -> None:
    """What the connection has no room for waits in a thread, in order."""
    link.client._peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    names = [str(number) * 60_000 for number in range(8)]
    answers = [link.client.unload_adapter(name) for name in names]
    late = link.client.is_sleeping()
    for name, answer in zip(names, answers, strict=True):
        operation, number, received = link.read(1000)
        assert (operation, received) == ("unload_adapter", name)
        link.engine.sendall(frames.pack("answer", number, None, None))
        assert answer.result(300) is None
    assert link.read()[0] == "is_sleeping"
    link.engine.sendall(frames.pack("answer", 8, False, None))
    assert late.result(300) is False


def sockets() -> set[str]:
    """The open sockets of this process."""
    links = set()
    for one in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.add(os.readlink(one))
    return {link for link in links if link.startswith("socket:")}


def reset(link: Link) -> None:
    """The kernel resets a connection with unread data."""
    link.client.is_sleeping()
    link.engine.close()


def half(link: Link) -> None:
    link.engine.sendall(frames.pack("beat", None)[:-1])
    link.engine.close()


def garbage(link: Link) -> None:
    link.engine.sendall((5).to_bytes(4, "big") + b"\xc1\xc1\xc1\xc1\xc1")


def unknown(link: Link) -> None:
    link.engine.sendall(frames.pack("events", "no events"))


@pytest.mark.parametrize("fault", [reset, half, garbage, unknown])
def test_a_broken_connection_ends_every_call_with_an_error(
    fault: Callable[[Link], None], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    before = sockets()
    link = Link(tokenizer, tmp_path / "engine")
    waiting = link.client.sleep(1)
    link.read()
    fault(link)
    assert link.died.wait(300)
    assert len(link.deaths) == 1
    with pytest.raises(EngineDead):
        waiting.result(300)
    link.engine.close()
    for _ in range(2):  # the first may fail as it is sent, or be given up
        with pytest.raises(EngineDead):
            link.client.wake_up().result(300)
    link.client.close()
    link.client._thread.join(300)
    assert sockets() <= before


class Replicas(Link):
    """The same with the engine as a replica, which is to come back."""

    def connect(self, path: str) -> ProcessCoreClient:
        address = json.dumps([[0, path, None]])
        self.replicas = ReplicaSet.join(address, lambda news: None, self._note)
        (replica,) = self.replicas._replicas
        assert replica.client is not None
        return replica.client


def test_a_call_in_flight_when_an_engine_dies_says_that_it_comes_back(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    link = Replicas(tokenizer, tmp_path / "engine")
    try:
        adapter = Adapter("poet", "/adapters/poet")
        calls = [link.replicas.load_adapter(adapter, False), link.replicas.unload_adapter("poet")]
        for operation in ("load_adapter", "unload_adapter"):
            assert link.read()[0] == operation
        link.engine.close()
        for call in calls:
            with pytest.raises(EngineRestarting):
                call.result(300)
        with pytest.raises(EngineRestarting):
            link.replicas.load_adapter(adapter, False).result(300)
        assert not link.deaths
    finally:
        link.replicas.close()
