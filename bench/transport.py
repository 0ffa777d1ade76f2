"""The cost of a message between machines: python bench/transport.py [--rounds 3]

Frames are sent over the loopback interface between two processes, alternating between: a plain TCP
socket, one with the TLS session that modulm uses between machines, and PAIR sockets of pyzmq
without security and with CURVE (`pip install pyzmq`; skipped if not installed).

echo: median microseconds until a frame has come back. cpu: microseconds of CPU time of both
processes, all threads, per echoed frame (each way) and per frame of a one-way burst. The minimum of
all rounds counts.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import statistics
import struct
import time
from collections.abc import Callable
from typing import Any

from modulm_distributed.tls import Connection, TlsSession, tls_contexts

try:
    import zmq
except ModuleNotFoundError:
    zmq = None  # type: ignore[assignment]

SECRET = b"a secret of two machines"
SIZES = (300, 4096, 65536)
TRANSPORTS = ("tcp", "tls", *(("zmq", "zmq-curve") if zmq else ()))
KEYS = [zmq.curve_keypair() for _ in range(2)] if zmq else []


class Stream:
    """Frames over a socket, as a front end sends and receives them."""

    def __init__(self, peer: socket.socket, secure: bool, server: bool) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        session = TlsSession(tls_contexts(SECRET), server) if secure else None
        if session is not None:
            session.handshake(peer)
        self._connection = Connection(peer, session)
        self._file = self._connection.reader()

    def send(self, data: bytes) -> None:
        frame = len(data).to_bytes(4, "big") + data
        self._connection.socket.sendall(self._connection.seal(frame))

    def recv(self) -> bytes:
        return self._file.read(int.from_bytes(self._file.read(4), "big"))


def opened(transport: str, told: Callable[[int], None]) -> Any:
    """Open the server's end and wait for the client. `told` is called with the port."""
    if transport.startswith("zmq"):
        peer = zmq.Context().socket(zmq.PAIR)
        if transport == "zmq-curve":
            peer.curve_server, peer.curve_secretkey = True, KEYS[0][1]
        told(peer.bind_to_random_port("tcp://127.0.0.1"))
        return peer
    with socket.create_server(("127.0.0.1", 0)) as server:
        told(server.getsockname()[1])
        accepted, _ = server.accept()
    return Stream(accepted, transport == "tls", True)


def connected(transport: str, port: int) -> Any:
    """Open the client's end."""
    if transport.startswith("zmq"):
        peer = zmq.Context().socket(zmq.PAIR)
        if transport == "zmq-curve":
            peer.curve_serverkey = KEYS[0][0]
            peer.curve_publickey, peer.curve_secretkey = KEYS[1]
        peer.connect(f"tcp://127.0.0.1:{port}")
        return peer
    return Stream(socket.create_connection(("127.0.0.1", port)), transport == "tls", False)


def spent() -> float:
    """Seconds of CPU time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def serve(transport: str, pipe: int) -> None:
    """Echo frames that begin with "e", drop others, and answer "?" with the CPU time."""
    peer = opened(transport, lambda port: os.write(pipe, struct.pack("!H", port)) and None)
    while True:
        data = peer.recv()
        if data[:1] == b"e":
            peer.send(data)
        elif data == b"?":
            peer.send(struct.pack("d", spent()))
        elif data == b"stop":
            return


def measure(transport: str) -> dict[int, tuple[float, float, float]]:
    """By size: microseconds of an echo, CPU of an echoed frame, CPU of a frame in a burst."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        serve(transport, writing)
        os._exit(0)
    peer = connected(transport, struct.unpack("!H", os.read(reading, 2))[0])

    def both() -> float:
        peer.send(b"?")
        return spent() + float(struct.unpack("d", peer.recv())[0])

    found = {}
    both()
    for size in SIZES:
        count = max(200, min(2000, 20_000_000 // size))
        data = os.urandom(size - 1)
        times, before = [], both()
        for _ in range(count):
            began = time.perf_counter()
            peer.send(b"e" + data)
            peer.recv()
            times.append(time.perf_counter() - began)
        between = both()
        for _ in range(count):
            peer.send(b"x" + data)
        both()
        after = both()
        per_frame = (between - before) / count / 2, (after - between) / count
        found[size] = (statistics.median(times) * 1e6, per_frame[0] * 1e6, per_frame[1] * 1e6)
    peer.send(b"stop")
    os.waitpid(child, 0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    runs: dict[str, list[dict[int, tuple[float, float, float]]]] = {t: [] for t in TRANSPORTS}
    for _ in range(rounds):
        for transport in TRANSPORTS:
            runs[transport].append(measure(transport))
    print("| bytes | transport | echo, us | of tcp | cpu, us, echoed | cpu, us, in a row |")
    print("|---:|---|---:|---:|---:|---:|")
    for size in SIZES:
        base = min(run[size][0] for run in runs["tcp"])
        for transport in TRANSPORTS:
            echo, cpu, row = (min(run[size][i] for run in runs[transport]) for i in range(3))
            print(f"| {size} | {transport} | {echo:.1f} | {echo / base:.2f} | {cpu:.1f} "
                  f"| {row:.1f} |")  # fmt: skip


if __name__ == "__main__":
    main()
