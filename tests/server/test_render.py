"""`/v1/chat/completions/render` and `/v1/completions/render`: what the engine would get."""

from __future__ import annotations

from typing import Any

import httpx

from modulm.contracts.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def test_a_chat_request_is_shown_as_it_would_run(http: httpx.Client, tokenizer: Tokenizer) -> None:
    body: dict[str, Any] = {
        "model": "M",
        "messages": [{"role": "user", "content": "call a tool <|im_end|>"}],
        "tools": [TOOL], "temperature": 0.5, "max_tokens": 7, "seed": 3, "stop": ["END"],
        "chat_template_kwargs": {"enable_thinking": False}, "request_id": "mine",
    }  # fmt: skip
    rendered = http.post(f"{CHAT}/render", json=body).json()
    answer = http.post(CHAT, json={**body, "return_token_ids": True}).json()
    assert rendered["token_ids"] == answer["prompt_token_ids"]
    assert rendered["prompt"] == tokenizer.decode(rendered["token_ids"], skip_special_tokens=False)
    assert rendered["prompt"].endswith("assistant\n<think>\n\n</think>\n\n")
    assert rendered["request_id"] == "chatcmpl-mine"
    params = rendered["sampling_params"]
    assert (params["temperature"], params["max_tokens"], params["seed"]) == (0.5, 7, 3)
    assert params["stop"] == ["END"]
    assert "output_kind" not in params
    # What it shows can be generated from: the same prompt as token ids.
    response = http.post("/v1/completions", json={"model": "M", "prompt": rendered["token_ids"]})
    assert response.status_code == 200


def test_refusals_are_those_of_the_request(http: httpx.Client) -> None:
    for body in (
        {"model": "M", "messages": []},
        {"model": "M", "messages": [{"role": "user", "content": "a"}], "temperature": -1},
        {"model": "M", "messages": [{"role": "nobody", "content": "a"}]},
    ):
        rendered, answer = http.post(f"{CHAT}/render", json=body), http.post(CHAT, json=body)
        assert (rendered.status_code, rendered.json()["error"]["message"]) == (
            400,
            answer.json()["error"]["message"],
        )
    assert http.post(f"{CHAT}/render", json={"model": "X", "messages": []}).status_code in (
        400,
        404,
    )


def test_every_prompt_of_a_completion_is_shown(http: httpx.Client, tokenizer: Tokenizer) -> None:
    body = http.post(
        "/v1/completions/render", json={"model": "M", "prompt": ["one two", "three"], "n": 2}
    ).json()
    assert [one["prompt"] for one in body] == ["one two", "three"]
    assert [one["token_ids"] for one in body] == [
        tokenizer.encode("one two"),
        tokenizer.encode("three"),
    ]
    assert body[0]["sampling_params"]["n"] == 2
    (ids,) = http.post("/v1/completions/render", json={"model": "M", "prompt": [5, 6]}).json()
    assert ids["token_ids"] == [5, 6]
    assert ids["prompt"] == tokenizer.decode([5, 6], skip_special_tokens=False)
