"""Connections between machines: only who knows the secret gets one, and nobody reads along."""

from __future__ import annotations

import secrets
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from modulm.errors import EngineError
from modulm_distributed.stream import FrameStream
from modulm_distributed.tls import Connection, TlsContexts, TlsSession, tls_contexts
from modulm_wire import frames

SECRET = b"a secret of two machines"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname(), 300)
        accepted, _ = server.accept()
        accepted.settimeout(300)
        with client, accepted:
            yield client, accepted


def handshake(
    client: socket.socket, server: socket.socket, theirs: TlsContexts, ours: TlsContexts
) -> tuple[TlsSession, TlsSession]:
    """Both sides, at the same time. Raises what the client's raises."""
    sessions = TlsSession(theirs), TlsSession(ours, server=True)
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(sessions[1].handshake, server)
        sessions[0].handshake(client)
        accepting.result()
    return sessions


def test_frames_arrive_in_both_directions(pair: tuple[socket.socket, socket.socket]) -> None:
    contexts = tls_contexts(SECRET)
    tls_contexts.cache_clear()  # as another process would, with a certificate of its own
    client, server = handshake(*pair, contexts, tls_contexts(SECRET))
    near, far = FrameStream(pair[0], client), FrameStream(pair[1], server)
    large = secrets.token_bytes(3 << 20)
    with ThreadPoolExecutor(1) as pool:
        for size in (0, 1, 300, 70_000, len(large)):
            sent = pool.submit(near.send, frames.pack("plan", large[:size]))
            assert far.receive() == ["plan", large[:size]]
            sent.result()
            sent = pool.submit(far.send, frames.pack("result", large[:size]) * 2)
            assert [near.receive(), near.receive()] == [["result", large[:size]]] * 2
            sent.result()
    near.close()
    assert far.receive() is None


def test_a_file_reads_the_peers_data(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = handshake(*pair, tls_contexts(SECRET), tls_contexts(SECRET))
    sending, reading = Connection(pair[0], client), Connection(pair[1], server).reader()
    sealed = sending.seal(b"first") + sending.seal(b"second")
    assert b"first" not in sealed
    pair[0].sendall(sealed)
    assert (reading.read(5), reading.read(6)) == (b"first", b"second")
    pair[0].shutdown(socket.SHUT_WR)
    assert reading.read(1) == b""


def test_another_secret_is_refused_by_both(pair: tuple[socket.socket, socket.socket]) -> None:
    session = TlsSession(tls_contexts(SECRET), server=True)
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(session.handshake, pair[1])
        with pytest.raises(ConnectionRefusedError, match="the secrets differ"):
            TlsSession(tls_contexts(b"another secret, as long")).handshake(pair[0])
        with pytest.raises(ConnectionRefusedError, match="the secrets differ"):
            accepting.result()


def test_a_client_without_a_certificate_is_refused(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Also one that does not verify the server, as somebody who scans ports would not."""
    contexts = tls_contexts(SECRET)
    careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(contexts.accept, pair[1])
        with careless.wrap_socket(pair[0]) as peer, pytest.raises(ssl.SSLError):
            peer.recv(1)
        with pytest.raises(ConnectionRefusedError, match="CERTIFICATE"):
            accepting.result()


def test_a_servers_certificate_is_no_clients(pair: tuple[socket.socket, socket.socket]) -> None:
    """What a server sends cannot be reflected: each side has a certificate for its own part."""
    contexts = tls_contexts(SECRET)
    reflecting = TlsContexts(contexts.client, contexts.server)
    assert contexts.server.verify_mode is ssl.CERT_REQUIRED
    assert contexts.client.minimum_version is ssl.TLSVersion.TLSv1_3
    with pytest.raises(ssl.SSLError):  # a context is for one side
        TlsSession(reflecting)


def test_changed_bytes_end_the_connection(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = handshake(*pair, tls_contexts(SECRET), tls_contexts(SECRET))
    sealed = bytearray(client.seal(frames.pack("run")))
    sealed[-1] ^= 1
    pair[0].sendall(sealed)
    assert FrameStream(pair[1], server).receive() is None


def test_a_tcp_stream_needs_a_session(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(EngineError, match="needs a TLS session"):
        FrameStream(pair[0])


def test_private_keys_leave_no_files(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tls_contexts.cache_clear()
    tls_contexts(SECRET)
    assert list(tmp_path.iterdir()) == []
