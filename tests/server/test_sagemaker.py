"""SageMaker's /invocations answers as the routes do whose requests it gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from modulm_server.testing import Live

ServerMaker = Callable[..., Live]
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def everything(make_server: ServerMaker) -> Live:
    return make_server(info={"tasks": ("generate", "embed", "classify", "score")})


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": MESSAGES}, "/v1/chat/completions"),
        ({"prompt": "hello", "max_tokens": 3}, "/v1/completions"),
        ({"input": "hello"}, "/v1/embeddings"),
        ({"text_1": "a", "text_2": "b"}, "/score"),
        ({"query": "a", "documents": ["b", "c"]}, "/rerank"),
    ],
)
def test_requests_are_told_apart(everything: Live, body: dict[str, Any], path: str) -> None:
    with everything.client() as http:
        answer, expected = (http.post(to, json=body) for to in ("/invocations", path))
    assert answer.status_code == expected.status_code == 200

    def plain(response: httpx.Response) -> dict[str, Any]:
        return {k: v for k, v in response.json().items() if k not in ("id", "created")}

    assert plain(answer) == plain(expected)


def test_streams(everything: Live) -> None:
    body = {"messages": MESSAGES, "stream": True}
    with everything.client() as http:
        text = http.post("/invocations", json=body).text
    assert text.startswith("data: ")
    assert text.endswith("data: [DONE]\n\n")


def test_who_leaves_ends_the_request(everything: Live) -> None:
    engine = everything.engine
    before = len(engine.aborted)
    body = {"messages": [{"role": "user", "content": "count slowly"}], "stream": True}
    with (
        everything.client() as http,
        http.stream("POST", "/invocations", json={**body, "max_tokens": 500}) as answer,
    ):
        next(answer.iter_lines())
    for _ in range(30_000):
        if engine.active == 0:
            break
        httpx.get(f"{everything.url}/health")
    assert engine.active == 0
    assert len(engine.aborted) == before + 1


def test_classifiers_answer_with_classes(make_server: ServerMaker) -> None:
    live = make_server(info={"tasks": ("classify",)})
    with live.client() as http:
        answer = http.post("/invocations", json={"input": "hello"})
    assert "probs" in answer.json()["data"][0]


def test_errors_are_those_of_the_route(everything: Live) -> None:
    with everything.client() as http:
        wrong = http.post("/invocations", json={"prompt": "x", "temperature": 7})
        other = http.post("/invocations", json={"text": "x"})
        json_type = {"Content-Type": "application/json"}
        broken = http.post("/invocations", content=b"{", headers=json_type)
        untyped = http.post("/invocations", content=b"{}")
    assert wrong.json()["error"]["param"] == "temperature"
    answers = (wrong, other, broken, untyped)
    assert [answer.status_code for answer in answers] == [400, 400, 400, 415]
    assert "messages; prompt" in other.json()["error"]["message"]


def test_a_key_is_asked_for(make_server: ServerMaker) -> None:
    live = make_server(api_key=["right"])
    with live.client() as http:
        assert http.post("/invocations", json={"prompt": "x"}).status_code == 401
        answer = http.post(
            "/invocations", json={"prompt": "x"}, headers={"Authorization": "Bearer right"}
        )
    assert answer.status_code == 200
