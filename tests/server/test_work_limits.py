"""Work and memory are bounded before they are spent (reference cases A055 to A160, F65, F66)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import ContextLengthExceeded, QueueFull
from modulm_server.testing import Live, error_of
from modulm_server.text_work import TextWork

ServerMaker = Callable[..., Live]
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def bounded(make_server: ServerMaker) -> Live:
    """A server whose limits are low."""
    return make_server(
        info={"max_model_len": 4096},
        max_request_sequences=8,
        max_request_logprobs=1000,
        max_request_bytes=64 << 20,
        max_inflight_bytes=80 << 20,
    )


@pytest.fixture
def http(bounded: Live) -> Iterator[httpx.Client]:
    with bounded.client() as client:
        yield client


@pytest.fixture
def read(bounded: Live, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that are tokenized."""
    codec = type(bounded.engine.tokenizer._codec)
    lengths: list[int] = []
    plain = codec.encode

    def encode(self: Any, text: str, add_special_tokens: bool) -> list[int]:
        lengths.append(len(text))
        return plain(self, text, add_special_tokens)

    monkeypatch.setattr(codec, "encode", encode)
    return lengths


def user(content: Any) -> dict[str, Any]:
    return {"model": "M", "messages": [{"role": "user", "content": content}], "max_tokens": 1}


def test_a_prompt_that_cannot_fit_is_not_tokenized(http: httpx.Client, read: list[int]) -> None:
    text = "x" * 400_000
    for path, body in (
        (CHAT, user(text)),
        (CHAT, user([{"type": "text", "text": text}])),
        (COMPLETE, {"model": "M", "prompt": text}),
        (COMPLETE, {"model": "M", "prompt": ["a", text]}),
        ("/v1/messages", user(text)),
        ("/v1/responses", {"model": "M", "input": text}),
    ):
        response = http.post(path, json=body)
        assert response.status_code == 400, path
        assert "context" in response.text
    assert max(read, default=0) < 400_000


def test_50_megabytes_are_refused_unread(http: httpx.Client, read: list[int]) -> None:
    body = b'{"model": "M", "messages": [{"role": "user", "content": "' + b"x" * (50 << 20)
    response = http.post(CHAT, content=body + b'"}]}', headers=JSON)
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"
    for path, field in (("/tokenize", "prompt"), (COMPLETE, "prompt")):
        long_body = {"model": "M", field: "x" * (10 << 20), "truncate_prompt_tokens": 5}
        assert http.post(path, json=long_body).status_code == 400
    assert read == []


def test_what_would_be_too_many_objects_is_refused_unread(http: httpx.Client) -> None:
    for filling in (b"[],", b'{"a":0},', b"0,"):
        body = b'{"model": "M", "prompt": [' + filling * (1 << 21) + b"0]}"
        assert http.post(COMPLETE, content=body, headers=JSON).status_code == 413


def test_ids_that_are_too_many_to_detokenize(http: httpx.Client) -> None:
    response = http.post("/detokenize", json={"model": "M", "tokens": [5] * ((1 << 18) + 1)})
    assert response.status_code == 400
    assert error_of(response)["param"] == "tokens"
    long = http.post("/detokenize", json={"model": "M", "tokens": [5] * 10_000})
    assert len(long.json()["prompt"]) >= 10_000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a"] * 3, "n": 3}, "n"), ({"prompt": ["a"] * 9}, "n"),
        ({"prompt": ["a"] * 2, "n": 1, "best_of": 5}, "n"),
        ({"prompt": ["a"] * 2, "use_beam_search": True, "n": 5}, "n"),
        ({"prompt": ["a"] * 8, "logprobs": 20, "max_tokens": 4000}, "logprobs"),
        ({"prompt": ["a " * 2000] * 8, "prompt_logprobs": 20, "max_tokens": 1}, "logprobs"),
    ],
)  # fmt: skip
def test_products_of_fields_are_bounded(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    response = http.post(COMPLETE, json={"model": "M", "max_tokens": 2, **fields})
    assert response.status_code == 400
    assert error_of(response)["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a"] * 4, "n": 2}, {"prompt": ["a"] * 8},
        {"prompt": "a", "logprobs": 20, "max_tokens": 4000}, {"prompt": ["a"] * 8, "logprobs": 1},
    ],
)  # fmt: skip
def test_what_is_within_the_bounds(http: httpx.Client, fields: dict[str, Any]) -> None:
    assert http.post(COMPLETE, json={"model": "M", "max_tokens": 2, **fields}).status_code == 200


def test_the_bytes_of_all_requests_are_bounded(make_server: ServerMaker) -> None:
    live = make_server(max_request_bytes=3000, max_inflight_bytes=4000)
    body = user("count slowly") | {"stream": True, "max_tokens": 50, "metadata": {"a": "x" * 500}}
    large = user("hi") | {"padding": "x" * 2800}
    with live.client() as client, live.client() as other:
        for _ in range(2):
            streams = [other.build_request("POST", CHAT, json=body) for _ in range(2)]
            answers = [other.send(stream, stream=True) for stream in streams]
            refused = client.post(CHAT, json=large)
            assert refused.status_code == 503
            assert error_of(refused)["code"] == "overloaded"
            assert "Retry-After" in refused.headers
            for answer in answers:
                answer.close()
            deadline = time.monotonic() + 300
            while (accepted := client.post(CHAT, json=large)).status_code == 503:
                assert time.monotonic() < deadline
            assert accepted.status_code == 200
        while live.served.app.body_bytes.bytes:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_long_texts_leave_the_loop_free(tokenizer: Tokenizer) -> None:
    """The library keeps the interpreter to itself while it tokenizes a text by `encode`."""

    async def turns() -> int:
        work = TextWork(tokenizer, 1 << 20)
        text = "hello world this is " * 50_000
        task = asyncio.ensure_future(work.run(len(text), tokenizer.encode, text))
        count = 0
        while not task.done():
            await asyncio.sleep(0.001)
            count += 1
        return count

    assert asyncio.run(turns()) > 10


def test_short_texts_do_not_wait_for_long_ones(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        work, go = TextWork(tokenizer, 1 << 20, threads=1), threading.Event()
        long = [asyncio.ensure_future(work.run(10 << 20, go.wait))]
        await asyncio.sleep(0)
        assert await work.run(10_000, lambda: "short") == "short"
        assert await work.run(10, lambda: "tiny") == "tiny"
        long.append(asyncio.ensure_future(work.run(5 << 20, go.wait)))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await work.run(5 << 20, go.wait)
        go.set()
        assert all(await asyncio.gather(*long))
        assert await work.run(30 << 20, lambda: "alone") == "alone"

    asyncio.run(check())


def test_lengths_that_are_read(tokenizer: Tokenizer) -> None:
    work = TextWork(tokenizer, 300_000)
    most = work.max_characters_per_token
    assert most == max(map(len, tokenizer.core.get_vocab()))
    work.check(16 * 300_000)
    work.check_fits(300_000 * min(most, 16))
    with pytest.raises(ContextLengthExceeded, match="too many to tokenize"):
        work.check(16 * 300_000 + 1)
    small = TextWork(tokenizer, 100)
    small.check(1 << 20)
    small.check_fits(100 * most)
    with pytest.raises(ContextLengthExceeded, match="at least 101 tokens"):
        small.check_fits(100 * most + 1)
