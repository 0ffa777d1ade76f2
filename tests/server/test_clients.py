"""Clients that leave, and clients that only close their sending half (reference cases F01, F02)."""

from __future__ import annotations

import gc
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from modulm_server.testing import Live

ServerMaker = Callable[..., Live]

CHAT = "/v1/chat/completions"
#: What answers after 0.9 s with one token: less than what passes for accepted (1 s).
SAID = "think long"
MESSAGES = [{"role": "user", "content": SAID}]
#: A body for every route that asks the engine for something.
ASKING: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 1},
    "/v1/completions": {"prompt": [SAID, "speak of emoji"], "max_tokens": 1},
    f"{CHAT}/batch": {"messages": [MESSAGES, MESSAGES], "max_tokens": 1},
    "/generative_scoring": {"query": SAID, "items": ["b"], "label_token_ids": [5, 6]},
    "/inference/v1/generate": {"token_ids": [], "sampling_params": {"max_tokens": 1}},
    "/v1/responses": {"input": SAID, "max_output_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v2/chat": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/chat": {"message": SAID, "max_tokens": 1},
    "/v1/embeddings": {"input": ["hello", SAID]},
    "/v2/embed": {"model": "M", "texts": [SAID]},
    "/pooling": {"input": SAID},
    "/classify": {"input": SAID},
    "/api/chat": {"model": "M", "messages": [{"role": "user", "content": SAID}], "stream": False},
    "/api/generate": {"model": "M", "prompt": SAID, "stream": False},
    "/api/embed": {"model": "M", "input": SAID},
    "/api/embeddings": {"model": "M", "prompt": SAID},
    "/completion": {"prompt": SAID, "n_predict": 1},
    "/embedding": {"content": SAID},
    "/score": {"text_1": SAID, "text_2": "b"},
    "/v1/score": {"text_1": SAID, "text_2": "b"},
    "/rerank": {"query": SAID, "documents": ["b"]},
    "/v1/rerank": {"query": SAID, "documents": ["b"]},
    "/v2/rerank": {"query": SAID, "documents": ["b"]},
}
#: Routes whose answer needs no step of the engine.
QUIET = frozenset(
    {
        "/ping", "/tokenize", "/detokenize", "/v1/messages/count_tokens",
        "/v1/responses/input_tokens", "/v1/responses/{response_id}/cancel",
        "/v1/conversations", "/v1/conversations/{conversation_id}",
        "/v1/conversations/{conversation_id}/items",
        "/v1/files", "/v1/batches", "/v1/batches/{batch_id}/cancel",
        "/v1/completions/render", "/v1/chat/completions/render",
        "/v1/messages/render", "/v1/responses/render",
        "/cohere/v2/chat", "/cohere/v2/chat/render", "/v2/chat/render",
        "/v1/completions/derender", "/v1/chat/completions/derender",
        "/api/pull", "/api/show", "/api/create", "/api/copy", "/api/push", "/api/blobs/{digest}",
        "/invocations", "/v1/documents", "/props", "/slots/{id_slot}", "/lora-adapters",
        "/inference/v1/abort_requests",
        "/apply-template",
        "/infill",
        "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech",
    }
)  # fmt: skip


@pytest.fixture(scope="module")
def everything(make_server: ServerMaker) -> Live:
    return make_server(info={"tasks": ("generate", "embed", "classify", "score")})


def request(path: str, body: dict[str, Any], version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def connect(live: Live) -> socket.socket:
    where = urlsplit(live.url)
    return socket.create_connection((where.hostname, where.port), timeout=300)


def everything_read(sock: socket.socket) -> bytes:
    received = b""
    while piece := sock.recv(65536):
        received += piece
    return received


def until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.005)


def posts(live: Live) -> Iterator[str]:
    for route in live.served.api.router.routes:
        if "POST" in (getattr(route, "methods", None) or ()):
            yield route.path  # type: ignore[attr-defined]


def test_every_route_is_known_to_this_file(everything: Live) -> None:
    assert set(posts(everything)) == ASKING.keys() | QUIET


@pytest.mark.parametrize("path", ASKING)
def test_f01_who_leaves_a_plain_request_ends_it(everything: Live, path: str) -> None:
    """Also within the first second, in which a refusal is waited for."""
    engine, body = everything.engine, ASKING[path]
    if "token_ids" in body:
        body = {**body, "token_ids": list(engine.tokenizer.encode(SAID))}
    before = len(engine.aborted)
    with connect(everything) as sock:
        sock.sendall(request(path, body))
        until(lambda: engine.active > 0)
    until(lambda: engine.active == 0)
    assert len(engine.aborted) > before


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/embeddings"])
def test_f02_who_closes_the_sending_half_gets_the_answer(everything: Live, path: str) -> None:
    with connect(everything) as sock:
        sock.sendall(request(path, ASKING[path]))
        sock.shutdown(socket.SHUT_WR)
        received = everything_read(sock)
    assert received.startswith(b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert b"connection: close\r\n" in received
    assert b'"usage"' in received


def test_f02_only_who_expects_100_continue_gets_it(live: Live) -> None:
    asked = request(CHAT, {"messages": MESSAGES, "max_tokens": 1})
    asked = asked.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n", 1)
    with connect(live) as sock:
        sock.sendall(asked)
        sock.shutdown(socket.SHUT_WR)
        received = everything_read(sock)
    assert received.startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert b"HTTP/1.1 200 OK" in received
    assert b"102 Processing" not in received


def test_f02_a_stream_goes_on_as_well(live: Live) -> None:
    body = {"messages": [{"role": "user", "content": "count slowly"}], "max_tokens": 12}
    with connect(live) as sock:
        sock.sendall(request(CHAT, {**body, "stream": True}))
        received = b""
        while b"data: " not in received:
            received += sock.recv(65536)
        sock.shutdown(socket.SHUT_WR)
        received += everything_read(sock)
    assert b": still working\n\n" in received
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert live.engine.active == 0


@pytest.mark.parametrize("stream", [False, True])
def test_f01_who_leaves_after_closing_the_sending_half(live: Live, stream: bool) -> None:
    before = len(live.engine.aborted)
    messages = [{"role": "user", "content": "count slowly"}]
    body = {"messages": messages, "max_tokens": 200, "stream": stream}
    with connect(live) as sock:
        sock.sendall(request(CHAT, body))
        until(lambda: live.engine.active == 1)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1024)
    until(lambda: live.engine.active == 0)
    assert len(live.engine.aborted) == before + 1


def test_f01_who_leaves_with_requests_in_line(live: Live) -> None:
    """Nothing is read while a request waits behind another one, the end of the client neither."""
    before = len(live.engine.aborted)
    body = {"messages": [{"role": "user", "content": "count slowly"}], "max_tokens": 200}
    with connect(live) as sock:
        sock.sendall(request(CHAT, body) * 3)
        until(lambda: live.engine.active == 1)
    until(lambda: live.engine.active == 0)
    assert len(live.engine.aborted) == before + 1


def test_f02_requests_in_line_are_answered_to_who_closed_the_sending_half(live: Live) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    with connect(live) as sock:
        sock.sendall(request(CHAT, body) * 3)
        sock.shutdown(socket.SHUT_WR)
        assert everything_read(sock).count(b"HTTP/1.1 200 OK") == 3


def test_http_1_0_knows_no_interim_responses(live: Live) -> None:
    with connect(live) as sock:
        sock.sendall(request(CHAT, {"messages": MESSAGES, "max_tokens": 1}, "1.0"))
        sock.shutdown(socket.SHUT_WR)
        received = everything_read(sock)
    assert received.startswith(b"HTTP/1.1 200 OK")
    assert b"HTTP/1.1 1" not in received


def test_a_request_that_is_cut_has_no_answer(live: Live) -> None:
    whole = request(CHAT, {"messages": MESSAGES})
    for length in (10, len(whole) - 5):
        with connect(live) as sock:
            sock.sendall(whole[:length])
            sock.shutdown(socket.SHUT_WR)
            assert everything_read(sock) == b""


def test_unix_sockets(make_server: ServerMaker, tmp_path: Path) -> None:
    """The kernel tells a half from the whole; nothing extra is sent."""
    path = str(tmp_path / "socket")
    live = make_server(uds=path)
    for leave in (False, True):
        before = len(live.engine.aborted)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(path)
            sock.sendall(request(CHAT, {"messages": MESSAGES, "max_tokens": 1}))
            until(lambda: live.engine.active == 1)
            sock.shutdown(socket.SHUT_WR)
            if not leave:
                assert everything_read(sock).startswith(b"HTTP/1.1 200 OK")
        until(lambda: live.engine.active == 0)
        assert len(live.engine.aborted) == before + leave


def test_who_leaves_is_no_error(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        with connect(live) as sock:
            sock.sendall(request(CHAT, {"messages": MESSAGES}))
            until(lambda: live.engine.active == 1)
        until(lambda: live.engine.active == 0)
        with connect(live) as sock:
            sock.sendall(request(CHAT, {"messages": MESSAGES})[:-5])
    gc.collect(1)  # on a busy machine this takes a while, and the loops of all servers warn of it
    records = [record for record in caplog.records if record.module != "loop_watch"]
    assert not [record for record in records if record.levelname in ("WARNING", "ERROR")]


def test_a_batch_does_not_leave(live: Live) -> None:
    """Its lines have nobody behind them who could: they are answered, however long it takes."""
    body = {"model": "M", "messages": [{"role": "user", "content": "count slowly"}]}
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {**body, "max_tokens": 20}}
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
        source = client.files.create(file=("x", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=source.id, endpoint=CHAT, completion_window="24h"
        )
        until(lambda: client.batches.retrieve(batch.id).status == "completed")
        assert client.batches.retrieve(batch.id).request_counts.completed == 1
