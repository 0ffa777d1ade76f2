"""Requests that are wrong before their fields are looked at (reference cases A001 to A039)."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from modulm_server.serve import Server
from modulm_server.testing import Live, error_of

ServerMaker = Callable[..., Live]

CHAT = {
    "model": "M",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 4,
    "temperature": 0,
}
JSON = {"Content-Type": "application/json"}
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def strict(make_server: ServerMaker) -> Live:
    """A server that waits for no more than 0.3 s."""
    return make_server(request_timeout=0.3)


@pytest.fixture(scope="module")
def named(make_server: ServerMaker) -> Live:
    """A server whose answers have the requests' ids."""
    return make_server(enable_request_id_headers=True)


@pytest.mark.parametrize(
    "body",
    [b'{"model":', b"", '{"model": "M"}'.encode("utf-16"), b"\xff\xfe", b"{" * 50_000],
)
def test_a001_broken_json(http: httpx.Client, body: bytes) -> None:
    response = http.post(PATH, content=body, headers=JSON)
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_json"


def test_a003_a_body_of_no_length(live: Live) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for length in ("Content-Length: 0\r\n", ""):
        reply = live.raw(f"{head}{length}Connection: close\r\n\r\n".encode())
        assert reply.startswith(b"HTTP/1.1 400")
        assert b'"code":"invalid_json"' in reply


def test_a026_forms_that_are_larger_than_what_is_in_them(http: httpx.Client) -> None:
    boundary = "x" * 200_000
    kinds = (f"multipart/form-data; boundary={boundary}"[:60_000], "multipart/form-data",
             "multipart/form-data; boundary=", 'multipart/form-data; boundary="')  # fmt: skip
    for kind in kinds:
        answer = http.post("/v1/files", content=b"--x\r\n\r\n", headers={"Content-Type": kind})
        assert answer.status_code in (400, 413, 431), kind[:60]
    fields = [("purpose", (None, b"batch"))] * 10_000
    answer = http.post("/v1/files", files=fields)  # type: ignore[arg-type]
    assert answer.status_code == 400
    error_of(answer)


def test_f64_many_requests_on_one_connection_leave_nothing(live: Live, http: httpx.Client) -> None:
    def kept() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    http.get("/health")
    before = kept()
    for _ in range(200):
        assert http.get("/health").status_code == 200
    files, threads = kept()
    assert files < before[0] + 10
    assert threads < before[1] + 10  # a pool of another test's server may start one meanwhile


def test_f43_more_clients_than_files(
    start_process: Callable[..., tuple[subprocess.Popen[bytes], str]],
) -> None:
    """Those beyond the limit wait or are hung up on; when the others leave, all is well."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))"
    popen, url = start_process(announced=limit)
    where = urlsplit(url)
    clients = []
    for _ in range(120):
        with suppress(OSError):
            clients.append(socket.create_connection((where.hostname, where.port), timeout=5))
    assert len(clients) > 48
    for client in clients:
        client.close()
    end = time.monotonic() + 300
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=300).status_code == 200:
                break
        except httpx.TransportError:
            time.sleep(0.05)
        assert popen.poll() is None
        assert time.monotonic() < end
    assert httpx.post(url + PATH, json=CHAT, timeout=300).status_code == 200


def test_a001_a_byte_order_mark_is_harmless(http: httpx.Client) -> None:
    body = b"\xef\xbb\xbf" + json.dumps(CHAT).encode()
    assert http.post(PATH, content=body, headers=JSON).status_code == 200


@pytest.mark.parametrize("body", ["[]", "42", "null", '"x"', '[{"model":"M"}]'])
def test_a002_no_object(http: httpx.Client, body: str) -> None:
    response = http.post(PATH, content=body, headers=JSON)
    assert response.status_code == 400
    assert error_of(response)["param"] is None


def test_a005_a_declared_length_is_refused_before_reading(live: Live) -> None:
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Content-Length: 1000000000\r\n\r\n"
    )
    reply = live.raw(head.encode() + b"x" * 1024)
    assert reply.startswith(b"HTTP/1.1 413")


def test_a086_a_body_that_grows_too_large(make_server: ServerMaker) -> None:
    small = make_server(max_request_bytes=10_000)

    def body() -> Any:
        for _ in range(100):
            yield b" " * 1000

    with small.client() as client:
        response = client.post(PATH, content=body(), headers=JSON)
    assert response.status_code == 413
    error_of(response)


@pytest.mark.parametrize(
    "headers", ["X: " + "a" * 70_000 + "\r\n", "".join(f"X-{i}: 1\r\n" for i in range(1000))]
)
def test_a008_a009_heads_that_are_too_large(live: Live, headers: str) -> None:
    reply = live.raw(f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode())
    assert reply.startswith(b"HTTP/1.1 431")


def test_a010_a_head_without_end(live: Live) -> None:
    reply = live.raw(b"GET / HTTP/1.1\r\nX: " + b"a" * 4_000_000)
    assert reply == b"" or reply.startswith(b"HTTP/1.1 431")


def test_a007_a_client_that_sends_a_head_byte_by_byte_is_hung_up_on(strict: Live) -> None:
    where = urlsplit(strict.url)
    with socket.create_connection((where.hostname, where.port), timeout=300) as sock:
        for letter in b"GET ":
            sock.sendall(bytes([letter]))
            time.sleep(0.02)
        assert sock.recv(100) == b""


def test_a_client_that_stops_in_the_middle_of_a_body_is_hung_up_on(strict: Live) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    reply = strict.raw(f"{head}Content-Length: 100\r\n\r\n{{".encode())
    assert reply.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
        b"POST / HTTP/1.1\r\nHost: ::1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\x00\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"GET /health HTTP/1.1\nHost: localhost\n\n",
        b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: ::1\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"POST / HTTP/1.1\r\nHost: ::1\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nabcde\r\n",
        b"POST / HTTP/1.1\r\nHost: ::1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"F" * 17,
        b"POST / HTTP/1.1\r\nHost: ::1\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: ::1\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: ::1\r\nContent-Length: 5_0\r\n\r\n",
    ],
)
def test_a021_requests_that_could_be_read_in_two_ways(live: Live, data: bytes) -> None:
    assert live.raw(data).startswith(b"HTTP/1.1 400")


def series(http: httpx.Client) -> set[str]:
    lines = http.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0] for line in lines if line.startswith("http_requests_total")}


def test_a022_a023_a024_labels_do_not_grow(http: httpx.Client) -> None:
    http.get("/nothing/at/all")
    http.request("BREW", "/v1/models")
    http.post(PATH, json={**CHAT, "model": "other"})
    http.get("/metrics")
    before = series(http)
    for number in range(20):
        assert http.get(f"/random/{number}").status_code == 404
        http.request(f"VERB{number}", "/v1/models")
        response = http.post(PATH, json={**CHAT, "model": f"m{number}" * 2000})
        assert response.status_code == 404
        error = error_of(response)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert len(response.text) < 600
    assert series(http) == before


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate"])
def test_a025_compressed_bodies(http: httpx.Client, encoding: str) -> None:
    headers = {**JSON, "Content-Encoding": encoding}
    response = http.post(PATH, content=b"\x1f\x8b", headers=headers)
    assert response.status_code == 415
    error_of(response)


def test_another_content_type(http: httpx.Client) -> None:
    response = http.post(PATH, content=b"a=b", headers={"Content-Type": "text/plain"})
    assert response.status_code == 415
    error_of(response)


def test_a027_log_lines_cannot_be_forged(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        http.post(PATH, params={"x": "\r\nFORGED"}, json={**CHAT, "a\nERROR forged": 1})
        http.post(PATH, json={**CHAT, "model": "\x1b[31mred\nERROR forged"})
    assert any("forged" in record.getMessage() for record in caplog.records)
    for record in caplog.records:
        assert "\n" not in record.getMessage()
        assert "\x1b" not in record.getMessage()


@pytest.mark.parametrize("name", ["x" * 10_240, "\xe9", "~[31m", "", "fine-1.2_3"])
def test_a028_request_ids(live: Live, name: str) -> None:
    with live.client() as client:
        headers = {**JSON, "X-Request-Id": name.encode("latin-1")}
        answer = client.post(PATH, json=CHAT, headers=headers)
    assert answer.status_code == 200
    assert re.fullmatch(r"chatcmpl-[A-Za-z0-9._-]{1,128}", answer.json()["id"])


@pytest.mark.parametrize("name", [b"a\x1b[31mb", b"a\tb", b"a\x00b", b"a\x7fb", b"a\x01b"])
def test_a028_control_characters_in_request_ids(named: Live, name: bytes) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Request-Id: "
    answer = named.raw(head + name + b"\r\n\r\n")
    status = answer.split(b" ")[1]
    assert status in (b"200", b"400")
    if status == b"200":
        assert re.search(rb"\r\nx-request-id: a(\[31m|31m)?b\r\n", answer)


def test_request_id_header(named: Live) -> None:
    with named.client() as client:
        response = client.get("/health", headers={"X-Request-Id": "mine"})
        assert response.headers["x-request-id"] == "mine"
        assert client.get("/nothing").headers["x-request-id"]


def test_a029_the_same_request_id_twice(live: Live) -> None:
    def ask(text: str) -> str:
        body = {**CHAT, "messages": [{"role": "user", "content": text}], "max_tokens": 40}
        with live.client() as client:
            headers = {"X-Request-Id": "same"}
            answer = client.post(PATH, json={**body, "request_id": "same"}, headers=headers)
        return str(answer.json()["choices"][0]["message"]["content"])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, ["speak of emoji", "hi", "speak of emoji", "hi"]))
    assert answers == ["🎈 été 你好", "Hello there."] * 2


def test_a032_pipelined_requests(live: Live) -> None:
    count = 200
    one = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    reply = live.raw(one * (count - 1) + last)
    assert reply.count(b"HTTP/1.1 200") == count


def test_a033_methods(http: httpx.Client) -> None:
    head = http.head("/v1/models")
    assert (head.status_code, head.content) == (200, b"")
    trace = http.request("TRACE", "/v1/models")
    assert trace.status_code == 405
    get = http.get(PATH)
    assert get.status_code == 405
    assert "POST" in get.headers["allow"]
    error_of(get)


def test_unknown_paths_have_our_errors(http: httpx.Client) -> None:
    response = http.get("/v1/nothing")
    assert response.status_code == 404
    assert error_of(response)["type"] == "not_found_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a037_what_went_wrong_inside_stays_inside(
    http: httpx.Client, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "leak a secret"}], "stream": stream}
    with caplog.at_level(logging.ERROR):
        response = http.post(PATH, json=body)
    assert response.status_code == 500
    error = error_of(response)
    assert "secret" not in response.text
    reference = re.search(r"request ([0-9a-f]{32})", error["message"])
    assert reference is not None
    assert any(reference.group(1) in r.getMessage() for r in caplog.records)
    assert any("secret" in r.getMessage() for r in caplog.records)


def test_a170_prompts_are_not_logged_or_measured(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        http.post(PATH, json={**CHAT, "messages": [{"role": "user", "content": "SECRET42"}]})
    assert "SECRET42" not in http.get("/metrics").text
    assert not any("SECRET42" in record.getMessage() for record in caplog.records)


def connected(live: Live) -> socket.socket:
    where = urlsplit(live.url)
    return socket.create_connection((where.hostname, where.port), timeout=300)


def head_of(path: str, length: int) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length}\r\n\r\n".encode()


def test_a_body_in_drops_counts_as_silence(strict: Live) -> None:
    with connected(strict) as sock:
        sock.sendall(head_of(PATH, 100_000))
        sock.settimeout(0.05)
        answer = b""
        for _ in range(2000):
            with suppress(TimeoutError):
                answer = sock.recv(100)
                break
            sock.sendall(b" ")
        assert answer.startswith(b"HTTP/1.1 408")


def test_a_large_body_that_comes_steadily_is_taken(make_server: ServerMaker) -> None:
    """Longer than the patience in all, never that slow. A busy machine may need more patience."""

    def body(patience: float) -> Any:
        yield json.dumps(CHAT).encode()
        for _ in range(12):
            time.sleep(patience / 6)
            yield b" " * 4096

    def taken(patience: float) -> bool:
        with make_server(request_timeout=patience).client() as client:
            answer = client.post(PATH, content=body(patience), headers=JSON)
        return answer.status_code == 200

    assert any(taken(patience) for patience in (0.6, 3.0, 15.0))


def test_the_rest_of_a_body_that_nobody_reads_has_its_time(strict: Live) -> None:
    """Answered before it was sent; what still drips in does not keep the connection."""
    with connected(strict) as sock:
        sock.sendall(head_of("/v1/nothing", 9999))
        assert sock.recv(1000).startswith(b"HTTP/1.1 404")
        sock.settimeout(0.05)
        for _ in range(2000):
            try:
                if sock.recv(1000) == b"":
                    return
            except TimeoutError:
                sock.sendall(b" ")
            except ConnectionError:
                return
    pytest.fail("it is still open")


def test_idle_connections_make_room_for_new_ones(make_server: ServerMaker) -> None:
    small = make_server(max_connections=4)
    with ExitStack() as stack:
        socks = [stack.enter_context(connected(small)) for _ in range(4)]
        for sock in socks[1:]:
            sock.sendall(head_of(PATH, 9) + b"{")
        with small.client() as client:
            assert client.get("/health").status_code == 200
        assert socks[0].recv(100).startswith(b"HTTP/1.1 503")
        socks[1].settimeout(0.1)
        with pytest.raises(TimeoutError):
            socks[1].recv(100)


def test_connections_that_are_answered_stay(make_server: ServerMaker) -> None:
    small = make_server(max_connections=2)
    slow = {**CHAT, "messages": [{"role": "user", "content": "count slowly"}], "max_tokens": 200}
    with small.client() as client, ExitStack() as stack:
        running = []
        for _ in range(2):
            stream = client.stream("POST", PATH, json={**slow, "stream": True})
            running.append(stack.enter_context(stream).iter_lines())
            next(running[-1])
        with connected(small) as sock:
            reply = b""
            while piece := sock.recv(1000):
                reply += piece
        head, _, body = reply.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert f"content-length: {len(body)}".encode() in head
        assert json.loads(body)["error"]["code"] == "overloaded"
        assert all(next(lines) is not None for lines in running)


class _Begins(Server):
    """A server process just before it takes connections."""

    def __init__(self) -> None:
        self.waits: list[bool] = []

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        for sock in sockets or ():
            self.waits.append(os.get_blocking(sock.fileno()))
            sock.close()


def test_a_server_process_that_begins_leaves_the_others_socket_as_it_is() -> None:
    """Another one stood still in `accept`, with what it had taken, when this one was started."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.setblocking(False)
        (begins := _Begins()).serve_on(socket.socket(fileno=os.dup(listener.fileno())))
        assert begins.waits
        assert not any(begins.waits)
        assert not os.get_blocking(listener.fileno())
