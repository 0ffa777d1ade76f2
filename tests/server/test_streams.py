"""Streams: readers that leave, failures in the middle, silence, many at once."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from modulm_server.testing import Live

ServerMaker = Callable[..., Live]

CHAT = "/v1/chat/completions"


def body(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "M", "messages": messages, "max_tokens": 100, "stream": True, **fields}


def until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.01)


@pytest.mark.parametrize("frames", [0, 3])
def test_f01_a_reader_that_leaves_ends_its_request(live: Live, frames: int) -> None:
    before = len(live.engine.aborted)
    with live.client() as client, client.stream("POST", CHAT, json=body("count slowly")) as answer:
        lines = answer.iter_lines()
        for _ in range(2 * frames):
            next(lines)
        assert live.engine.active == 1
    until(lambda: live.engine.active == 0)
    assert len(live.engine.aborted) == before + 1
    assert live.engine.active == 0


def test_f01_the_same_while_it_waits_for_a_whole_answer(live: Live) -> None:
    before = len(live.engine.aborted)
    live.abandon(CHAT, json=body("count slowly", stream=False))
    until(lambda: live.engine.active == 0)
    assert len(live.engine.aborted) == before + 1


def test_a_failure_in_the_middle_is_one_frame(live: Live) -> None:
    with live.client() as client:
        answer = client.post(CHAT, json=body("fail late"))
    assert answer.status_code == 200
    frames = [line for line in answer.text.split("\n\n") if line]
    assert frames[-1] == "data: [DONE]"
    error = json.loads(frames[-2].removeprefix("data: "))["error"]
    assert error["code"] == "engine_error"
    assert "scripted failure" not in answer.text
    assert sum('"error"' in f for f in frames) == 1


def test_f50_silence_is_broken_by_comments(make_server: ServerMaker) -> None:
    live = make_server(sse_keep_alive_interval=0.01)
    with live.client() as client:
        answer = client.post(CHAT, json=body("count slowly", max_tokens=5))
    assert ": still working\n\n" in answer.text
    data = [part for part in answer.text.split("\n\n") if part.startswith("data: {")]
    text = "".join(json.loads(d[6:])["choices"][0]["delta"].get("content", "") for d in data)
    assert text == "1 2 3 4"
    assert answer.text.endswith("data: [DONE]\n\n")


def test_a_client_that_does_not_read_is_hung_up_on(make_server: ServerMaker) -> None:
    """Its stream stops when the buffers are full, and is ended after the time allowed."""
    live = make_server(request_timeout=0.4, info={"max_model_len": 100_000})
    request = body("count slowly", max_tokens=90_000, logprobs=True, top_logprobs=20)
    request["messages"][0]["content"] = "flood"
    payload = json.dumps(request).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    where = urlsplit(live.url)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((where.hostname, where.port))
        sock.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        until(lambda: live.engine.active == 1)
        until(lambda: live.engine.active == 0)
    assert live.engine.aborted


def test_many_streams_all_complete(live: Live) -> None:
    async def one(client: httpx.AsyncClient) -> str:
        answer = await client.post(CHAT, json=body("speak of emoji"))
        parts = [p for p in answer.text.split("\n\n") if p.startswith("data: {")]
        assert answer.text.endswith("data: [DONE]\n\n")
        return "".join(json.loads(p[6:])["choices"][0]["delta"].get("content", "") for p in parts)

    async def many() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=live.url, timeout=300, limits=limits) as client:
            return await asyncio.gather(*(one(client) for _ in range(100)))

    assert set(asyncio.run(many())) == {"🎈 été 你好"}
    assert live.engine.active == 0
