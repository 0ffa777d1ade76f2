"""Who may tell an engine's process what to run: the process that started it, and nobody else.

The attack of issue 36: the port of a replica took a "start" frame from whoever connected first, and
ran the plugin files that it named.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from modulm.config import EngineConfig
from modulm.errors import CheckpointError, EngineDead, EngineError
from modulm.plugins.manager import PluginManager
from modulm_distributed.tls import TlsSession, tls_contexts
from modulm_server.engine.process_client import ProcessCoreClient
from modulm_server.engine.spawn import EngineProcess, connect
from modulm_wire import frames

SECRET = "a secret of two machines"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    (file := tmp_path / "secret").write_text(SECRET)
    return str(file)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """What the attacker's plugin file makes when it is run."""
    return tmp_path / "executed"


@pytest.fixture
def attack(tmp_path: Path, marker: Path) -> bytes:
    """A "start" frame that names a plugin file."""
    (code := tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    flags = frames.pack_config(EngineConfig.from_keywords(model="no/such/folder"))
    selection, installed, registered, modules, files, path = frames.pack_plugins(
        PluginManager().snapshot()
    )
    plugins = [selection, installed, registered, modules, [*files, str(code)], path]
    return frames.pack("start", flags, plugins)


def without_secret(peer: socket.socket, attack: bytes) -> None:
    """As of the released protocol, whose proof was a digest keyed with nothing.

    Its server spoke first; this one says nothing until it has heard a greeting.
    """
    peer.settimeout(0.2)
    with pytest.raises(TimeoutError):
        peer.recv(32)
    peer.settimeout(300)
    nonce = bytes(32)
    own = os.urandom(32)
    proof = hmac.new(b"", b"client" + nonce + own, hashlib.sha256).digest()
    peer.sendall(own + proof + attack)


def plainly(peer: socket.socket, attack: bytes) -> None:
    peer.sendall(attack)


def with_another_secret(peer: socket.socket, attack: bytes) -> None:
    session = TlsSession(tls_contexts(b"what the attacker knows"))
    session.handshake(peer)
    peer.sendall(session.seal(attack))


def with_the_secret(peer: socket.socket, attack: bytes) -> None:
    """A front end of another machine may send requests, and not say what is run."""
    session = TlsSession(tls_contexts(SECRET.encode()))
    session.handshake(peer)
    peer.sendall(session.seal(attack))


def test_strangers_cannot_start_an_engine(
    listener: socket.socket, secret_file: str, attack: bytes, marker: Path
) -> None:
    attempts = (without_secret, plainly, with_another_secret, with_the_secret)
    address = listener.getsockname()
    peers = [socket.create_connection(address, 300) for _ in attempts]  # before anybody else
    process = EngineProcess(None, listener, secret_file)
    try:
        for attempt, peer in zip(attempts, peers, strict=True):
            with suppress(OSError):
                attempt(peer, attack)
            with suppress(ConnectionResetError):
                while peer.recv(1 << 16):
                    pass  # until it is disconnected
            assert not marker.exists(), attempt.__name__
        process.start(EngineConfig.from_keywords(model="the/owners"), PluginManager())
        with pytest.raises(CheckpointError, match="the/owners"):
            ProcessCoreClient(process.address, print, print, process, secret_file)
    finally:
        for peer in peers:
            peer.close()
        process.close()
    assert not marker.exists()


def test_a_neighbour_on_the_unix_socket_cannot_start_an_engine(attack: bytes, marker: Path) -> None:
    process = EngineProcess()
    try:
        peer = connect(process.address).socket
        with peer, suppress(ConnectionResetError):
            peer.sendall(attack)
            assert peer.recv(1) == b""
        process.start(EngineConfig.from_keywords(model="the/owners"), PluginManager())
        with pytest.raises(CheckpointError, match="the/owners"):
            ProcessCoreClient(process.address, print, print, process)
    finally:
        process.close()
    assert not marker.exists()


def test_many_frames_at_once_arrive_whole(listener: socket.socket, secret_file: str) -> None:
    """Each in a TLS record of its own, several of which are read at once."""
    process = EngineProcess(None, listener, secret_file)
    try:
        connection = connect(process.address, secret_file)
        sizes = [n * 37 % 4000 for n in range(400)]
        sealed = [connection.seal(frames.pack("hello", bytes(size))) for size in sizes]
        connection.socket.sendall(b"".join(sealed))
        process.start(EngineConfig.from_keywords(model="the/owners"), PluginManager())
        reader = connection.reader()
        kind, _ = frames.unpack(reader.read(int.from_bytes(reader.read(4), "big")))
        assert kind == "error"
        connection.socket.close()
    finally:
        process.close()


def test_tcp_needs_a_secret(listener: socket.socket, secret_file: str) -> None:
    with pytest.raises(EngineError, match="requires a secret"):
        EngineProcess(None, listener)
    with pytest.raises(EngineError, match="requires a secret"):
        connect("127.0.0.1:1")
    with pytest.raises(EngineDead, match="no engine"):
        connect("127.0.0.1:1", secret_file)
