"""Damaged inputs of every kind that no other property test draws: HTTP bytes and batch files here;
plan frames, images, sound and adapters beside the tests of their readers.
"""

from __future__ import annotations

import json
import random
import re
import socket
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from modulm_route_files.lines import LinesError, check_lines, count_lines, read_lines
from modulm_server.testing import Live

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "M", "messages": [{"role": "user", "content": "hi"}]})
PIECES = [b"\r\n", b"\r\n\r\n", b"\n", b"\x00", b":", b" ", b"Content-Length: 5\r\n", b"0\r\n\r\n",
          b"Transfer-Encoding: chunked\r\n", b"Content-Length: 99999999999999999999\r\n",
          b"Expect: 100-continue\r\n", b"Upgrade: websocket\r\nConnection: Upgrade\r\n", b"\xff",
          b"HTTP/1.1", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"ffffffffffffffff\r\n"]  # fmt: skip


def request_bytes() -> list[bytes]:
    """Whole requests: with a body of known length, in chunks, and two at once."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    plain = f"{head}Content-Length: {len(BODY)}\r\n\r\n{BODY}".encode()
    chunks = f"{head}Transfer-Encoding: chunked\r\n\r\n{len(BODY):x}\r\n{BODY}\r\n0\r\n\r\n"
    get = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    return [plain, chunks.encode(), get + get, get + plain]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Bytes changed, cut out, put in or doubled, mostly where the syntax is."""
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(content) + 1)
        match rng.randrange(5):
            case 0:
                content[at : at + 1] = rng.randbytes(1)
            case 1:
                del content[at : at + rng.randrange(1, 9)]
            case 2:
                content[at:at] = content[at : at + 20]
            case 3:
                del content[at:]
            case _:
                content[at:at] = rng.choice(PIECES)
    return bytes(content)


def exchange(url: str, data: bytes) -> bytes:
    """Send bytes and nothing more; returns all that is answered before the connection ends."""
    where, received = urlsplit(url), b""
    with socket.create_connection((where.hostname, where.port), timeout=300) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while piece := sock.recv(65536):
                received += piece
        except ConnectionError:
            return received
    return received


def test_damaged_requests_get_an_answer_or_the_end(
    live: Live, rng: random.Random, rounds: int
) -> None:
    statuses: Counter[str] = Counter()
    for _ in range(150 * rounds):
        received = exchange(live.url, damaged(rng.choice(request_bytes()), rng))
        answer = re.match(rb"HTTP/1\.1 (\d{3}) ", received)
        assert answer or not received, received[:200]
        statuses[answer[1].decode() if answer else "ended"] += 1
    assert not {status for status in statuses if status.startswith("5")} - {"503"}, statuses
    assert {"200", "400"} <= statuses.keys()
    with live.client() as http:
        assert http.get("/health").status_code == 200
        assert http.get("/load").json() == {"server_load": 0}
        assert isinstance(http.post(CHAT, content=BODY.encode()), httpx.Response)


def test_damaged_batch_files_are_read_or_refused(
    tmp_path: Path, rng: random.Random, rounds: int
) -> None:
    """Each line is a request or has an error, and each reader says the same of a file."""
    lines = [{"custom_id": f"{i}", "method": "POST", "url": CHAT, "body": json.loads(BODY)}
             for i in range(4)]  # fmt: skip
    whole = b"\n".join(json.dumps(line).encode() for line in lines)
    path, seen = tmp_path / "batch", Counter[str]()
    for _ in range(120 * rounds):
        path.write_bytes(damaged(whole, rng))
        try:
            with path.open("rb") as source:
                check_lines(source, 1 << 20)
            count = count_lines(path, 1 << 20)
        except LinesError:
            seen["refused"] += 1
            continue
        read = list(read_lines(path, 1 << 20, CHAT))
        assert [line.number for line in read] == list(range(count))
        assert all(line.error is not None or line.body for line in read)
        seen.update("error" if line.error else "request" for line in read)
    assert seen["error"] > 10
    assert seen["request"] > 80
