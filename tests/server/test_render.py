"""Render, generate and derender: requests as the engine gets them, and tokens in and out."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

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


QUESTIONS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "call a tool"}], "tools": [TOOL]},
    {"messages": [{"role": "user", "content": "hello"}], "stop": [" the"]},
]


def events(answer: httpx.Response) -> list[Any]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("body", QUESTIONS)
def test_render_generate_and_derender_are_a_chat(http: httpx.Client, body: dict[str, Any]) -> None:
    body = {"model": "M", "max_tokens": 200, "temperature": 0, **body}
    whole = http.post(CHAT, json=body).json()
    rendered = http.post(f"{CHAT}/render", json=body).json()
    answer = http.post("/inference/v1/generate", json=rendered).json()
    assert answer["request_id"].endswith(rendered["request_id"])
    assert tokens(answer) == tokens(whole)
    derendered = http.post(
        f"{CHAT}/derender",
        json={
            "model": "M", "chat_request": body, "generate_response": answer,
            "prompt_tokens": answer["usage"]["prompt_tokens"],
        },
    ).json()  # fmt: skip
    assert shown(derendered["choices"][0]) == shown(whole["choices"][0])
    assert tokens(derendered) == tokens(whole)
    state, content, calls, reasons = None, "", "", []
    streamed = http.post(
        "/inference/v1/generate",
        json={**rendered, "stream": True, "stream_options": {"include_usage": True}},
    )
    *chunks, last = events(streamed)
    assert tokens(last) == tokens(answer)
    for chunk in chunks:
        more = {"stream": True, "chat_request": body, "generate_chunk": chunk}
        part = http.post(f"{CHAT}/derender", json={**more, "stream_state": state}).json()
        state = part["stream_state"]
        for choice in part["chunk"]["choices"]:
            content += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", ()):
                calls += call["function"].get("name", "") + call["function"]["arguments"]
            reasons.append(choice["finish_reason"])
    message = whole["choices"][0]["message"]
    assert content == (message["content"] or "")
    functions = [call["function"] for call in message.get("tool_calls", ())]
    assert calls == "".join(each["name"] + each["arguments"] for each in functions)
    assert reasons[-1] == whole["choices"][0]["finish_reason"]


def tokens(answer: dict[str, Any]) -> tuple[int, int]:
    return answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]


def shown(choice: dict[str, Any]) -> Any:
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return message["content"], message["reasoning"], calls, choice["finish_reason"]


def test_completions_of_tokens(http: httpx.Client) -> None:
    body = {"model": "M", "prompt": ["one", "two"], "max_tokens": 5, "temperature": 0}
    whole = http.post("/v1/completions", json={**body, "logprobs": 2}).json()
    rendered = http.post("/v1/completions/render", json={**body, "logprobs": 2}).json()
    answers = [http.post("/inference/v1/generate", json=each).json() for each in rendered]
    sampled = answers[0]["choices"][0]["logprobs"]["content"]
    assert [one["token_id"] for one in sampled] == answers[0]["choices"][0]["token_ids"]
    more = {"completion_request": body, "generate_responses": answers}
    derendered = http.post("/v1/completions/derender", json={**more, "prompt_tokens": [1, 1]})
    texts = [choice["text"] for choice in derendered.json()["choices"]]
    assert texts == [choice["text"] for choice in whole["choices"]]
    text = http.post("/inference/v1/generate", json={**rendered[0], "output_mode": "text"}).json()
    assert text["choices"][0]["text"] == texts[0]
    parts, state = "", None
    for token in answers[0]["choices"][0]["token_ids"]:
        chunk = {"choices": [{"index": 0, "token_ids": [token]}]}
        more = {"stream": True, "generate_chunk": chunk, "stream_state": state}
        part = http.post("/v1/completions/derender", json=more).json()
        state = part["stream_state"]
        parts += part["chunk"]["choices"][0]["text"]
    assert parts == texts[0]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [1], "features": {"a": 1}}, "features"),
        ("/inference/v1/generate", {"token_ids": [1], "output_mode": "x"}, "output_mode"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 0}}, "n"),
        ("/v1/completions/derender", {}, "generate_responses"),
        ("/v1/completions/derender", {"stream": True}, "generate_chunk"),
        (
            "/v1/completions/derender",
            {"generate_responses": [{"choices": [{"token_ids": [10**8]}]}]},
            "token_ids",
        ),
        (f"{CHAT}/derender", {"chat_request": QUESTIONS[1]}, "generate_response"),
    ],
)
def test_wrong_tokens_name_the_field(http: httpx.Client, path, body, field) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_messages_and_responses_are_shown_too(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hello"}]
    ids = http.post(f"{CHAT}/render", json={"messages": messages}).json()["token_ids"]
    more = {"messages": messages, "max_tokens": 5}
    shown = http.post("/v1/messages/render", json=more).json()
    assert (shown["token_ids"], shown["sampling_params"]["max_tokens"]) == (ids, 5)
    shown = http.post("/v1/responses/render", json={"input": "hello", "priority": 0}).json()
    assert shown["token_ids"] == ids
    wrong = http.post("/v1/messages/render", json={"messages": messages})
    assert wrong.json()["type"] == "error"
