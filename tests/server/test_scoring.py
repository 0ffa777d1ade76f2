"""Labels as the next token, and several conversations in one request, on the embedded model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from modulm.config import EngineConfig
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.testing import Live, serve_in_thread

SMALL = {"model": "demo", "max_model_len": 256, "num_gpu_blocks_override": 60, "cpu_threads": 1}
SCORING, BATCH = "/generative_scoring", "/v1/chat/completions/batch"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    config = EngineConfig.from_keywords(**SMALL, server_dev_mode=True)
    engine = AsyncLLM.from_config(config)
    try:
        with serve_in_thread(engine, config) as server:
            yield server
    finally:
        engine.shutdown()


def post(live: Live, path: str, body: dict[str, Any]) -> Any:
    with live.client() as http:
        return http.post(path, json=body)


def test_a_score_is_the_probability_of_the_first_label(live: Live) -> None:
    prompt = list(range(5, 25))
    ask = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 2}
    ask |= {"return_tokens_as_token_ids": True}
    top = post(live, "/v1/completions", ask).json()["choices"][0]["logprobs"]["top_logprobs"][0]
    (first, one), (second, two) = ((int(k.partition(":")[2]), math.exp(v)) for k, v in top.items())
    body = {"query": prompt[:12], "items": [prompt[12:], prompt[:3]]}
    body |= {"label_token_ids": [first, second]}
    answer = post(live, SCORING, {**body, "apply_softmax": False}).json()
    assert answer["data"][0]["score"] == pytest.approx(one, rel=1e-4)
    assert [each["index"] for each in answer["data"]] == [0, 1]
    assert answer["usage"]["prompt_tokens"] == 20 + 15
    scores = post(live, SCORING, body).json()["data"]
    assert scores[0]["score"] == pytest.approx(one / (one + two), rel=1e-4)
    reverse = {**body, "query": prompt[12:], "items": [prompt[:12]], "item_first": True}
    assert post(live, SCORING, reverse).json()["data"][0]["score"] == pytest.approx(
        scores[0]["score"], rel=1e-4
    )
    texts = {"query": "One two", "items": [" three"], "label_token_ids": [first]}
    assert post(live, SCORING, texts).json()["data"][0]["score"] == 1


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"items": []}, "items"), ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [10**6]}, "label_token_ids"), ({"items": ["a"] * 3000}, "items"),
    ],
)  # fmt: skip
def test_wrong_scoring_requests_name_the_field(live: Live, change: Any, param: str) -> None:
    body = {"query": "a", "items": ["b"], "label_token_ids": [5], **change}
    answer = post(live, SCORING, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_several_conversations_have_the_answers_of_each(live: Live) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("Hello!", "One two three")]
    same = {"max_tokens": 6, "temperature": 0}
    alone = [
        post(live, "/v1/chat/completions", {"messages": messages, **same}).json()
        for messages in conversations
    ]
    both = post(live, BATCH, {"messages": conversations, **same}).json()
    assert [choice["index"] for choice in both["choices"]] == [0, 1]
    assert [choice["message"] for choice in both["choices"]] == [
        each["choices"][0]["message"] for each in alone
    ]
    for name in ("prompt_tokens", "completion_tokens"):
        assert both["usage"][name] == sum(each["usage"][name] for each in alone)
    for change, param in (
        ({"stream": True}, "stream"), ({"n": 2}, "n"), ({"messages": [[]]}, "messages"),
        ({"messages": [conversations[0], [{"role": "x", "content": ""}]]}, None),
    ):  # fmt: skip
        answer = post(live, BATCH, {"messages": conversations, **same, **change})
        assert answer.status_code == 400, change
        assert param in (None, answer.json()["error"]["param"])


def test_caches_are_cleared(live: Live) -> None:
    for path in ("/reset_mm_cache", "/reset_encoder_cache"):
        assert post(live, path, {}).json() == {"success": True}
