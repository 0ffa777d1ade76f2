"""Cohere's chat API against a real server. Its own client runs in test_client_programs."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from modulm_server.testing import Live

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Of a city.", "parameters": PARAMETERS},
}
OLD_TOOL = {
    "name": "get_weather",
    "description": "Of a city.",
    "parameter_definitions": {"city": {"type": "str", "required": True}},
}
SMALL = {"input_tokens", "output_tokens"}


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "M", "messages": [{"role": "user", "content": text}], **fields}


def post(live: Live, path: str, body: dict[str, Any], status: int = 200) -> Any:
    answer = httpx.post(live.url + path, json=body, timeout=300)
    assert answer.status_code == status, answer.text
    return answer.json()


def stream(live: Live, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events or lines of a streamed answer."""
    text = httpx.post(live.url + path, json={**body, "stream": True}, timeout=300).text
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("path", ["/v2/chat", "/cohere/v2/chat"])
def test_a_message(live: Live, path: str) -> None:
    messages = [{"role": "system", "content": "Be kind."}, *ask("hi")["messages"]]
    answer = post(live, path, ask("hi", messages=messages, safety_mode="STRICT"))
    assert answer["message"]["content"] == [{"type": "text", "text": "Hello there."}]
    assert answer["finish_reason"] == "COMPLETE"
    assert answer["usage"]["tokens"].keys() == SMALL
    prompt = live.engine.seen[-1][0]["prompt"]
    assert "Be kind." in prompt
    assert post(live, path + "/render", ask("hi", messages=messages))["prompt"] == prompt


def test_why_an_answer_ended(live: Live) -> None:
    assert post(live, "/v2/chat", ask("hi", max_tokens=1))["finish_reason"] == "MAX_TOKENS"
    stopped = post(live, "/v2/chat", ask("stop at END", stop_sequences=["END"]))
    assert stopped["finish_reason"] == "STOP_SEQUENCE"


def test_thoughts(live: Live) -> None:
    thinking = {"type": "enabled", "token_budget": 64}
    content = post(live, "/v2/chat", ask("think first", thinking=thinking))["message"]["content"]
    assert [part["type"] for part in content] == ["thinking", "text"]
    assert live.engine.seen[-1][1].thinking_token_budget == 64
    answer = post(live, "/v2/chat", ask("think first", thinking={"type": "disabled"}))
    assert [part["type"] for part in answer["message"]["content"]] == ["text"]


def test_tools_and_their_results(live: Live) -> None:
    answer = post(live, "/v2/chat", ask("call a tool", tools=[TOOL]))
    assert answer["finish_reason"] == "TOOL_CALL"
    (call,) = answer["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    document = {"type": "document", "document": {"id": "1", "data": {"sky": "sunny"}}}
    messages = [
        *ask("call a tool")["messages"],
        {"role": "assistant", "tool_plan": "I will look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": [document]},
    ]
    post(live, "/v2/chat", ask("", messages=messages, tools=[TOOL]))
    prompt = live.engine.seen[-1][0]["prompt"]
    assert prompt.index('"city": "Paris"') < prompt.index('{"sky": "sunny"}')
    post(live, "/v2/chat", ask("call in its own format", tools=[TOOL], tool_choice="REQUIRED"))
    tag = json.loads(live.engine.seen[-1][1].structured_outputs.structural_tag)
    assert PARAMETERS in [one.get("json_schema") for one in tag["format"]["elements"]]


def test_settings_reach_the_engine(live: Live) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    fields = {"k": 5, "p": 0.5, "seed": 3, "frequency_penalty": 0.25, "temperature": 0.5}
    form = {"type": "json_object", "json_schema": schema}
    post(live, "/v2/chat", ask("hi", response_format=form, logprobs=True, **fields))
    params = live.engine.seen[-1][1]
    assert (params.top_k, params.top_p, params.seed) == (5, 0.5, 3)
    assert (params.frequency_penalty, params.temperature) == (0.25, 0.5)
    assert params.structured_outputs.json == schema
    assert params.logprobs == 0


@pytest.mark.parametrize("text", ["hi", "think first", "call two tools", "speak of emoji"])
def test_a_stream_is_the_whole_message(live: Live, text: str) -> None:
    body = ask(text, tools=[TOOL])
    whole = post(live, "/v2/chat", body)
    content: dict[int, dict[str, Any]] = {}
    calls: dict[int, dict[str, Any]] = {}
    events = stream(live, "/v2/chat", body)
    for event in events:
        match event["type"]:
            case "content-start":
                content[event["index"]] = event["delta"]["message"]["content"]
            case "content-delta":
                for name, piece in event["delta"]["message"]["content"].items():
                    content[event["index"]][name] += piece
            case "tool-call-start":
                calls[event["index"]] = event["delta"]["message"]["tool_calls"]
            case "tool-call-delta":
                more = event["delta"]["message"]["tool_calls"]["function"]["arguments"]
                calls[event["index"]]["function"]["arguments"] += more
    assert list(content.values()) == whole["message"].get("content", [])
    functions = [call["function"] for call in whole["message"].get("tool_calls", [])]
    assert [call["function"] for call in calls.values()] == functions
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-1]) == ("message-start", "message-end")
    assert kinds.count("content-start") == kinds.count("content-end") == len(content)
    assert kinds.count("tool-call-start") == kinds.count("tool-call-end") == len(calls)
    assert events[-1]["delta"]["finish_reason"] == whole["finish_reason"]
    assert events[-1]["delta"]["usage"]["tokens"] == whole["usage"]["tokens"]


def test_the_older_version(live: Live) -> None:
    history = [
        {"role": "USER", "message": "An earlier question."},
        {"role": "CHATBOT", "message": "", "tool_calls": [{"name": "get_weather"}]},
        {
            "role": "TOOL",
            "tool_results": [
                {"call": {"name": "get_weather", "parameters": {"city": "Rome"}},
                 "outputs": [{"sky": "sunny"}]},
            ],
        },
        {"role": "CHATBOT", "message": "It is sunny."},
    ]  # fmt: skip
    body = {"message": "hi", "preamble": "Be kind.", "chat_history": history, "max_tokens": 50}
    whole = post(live, "/v1/chat", body)
    assert (whole["text"], whole["finish_reason"]) == ("Hello there.", "COMPLETE")
    assert whole["chat_history"][-2:] == [
        {"role": "USER", "message": "hi"},
        {"role": "CHATBOT", "message": "Hello there."},
    ]
    prompt = live.engine.seen[-1][0]["prompt"]
    places = [prompt.index(text) for text in ("Be kind.", "Rome", "sunny", "It is sunny.")]
    assert places == sorted(places)
    *_, last = lines = stream(live, "/v1/chat", body)
    assert "".join(line.get("text", "") for line in lines) == "Hello there."
    assert last["response"]["text"] == "Hello there."
    called = post(live, "/v1/chat", {"message": "call a tool", "tools": [OLD_TOOL]})
    assert called["tool_calls"] == [{"name": "get_weather", "parameters": {"city": "Paris"}}]


def test_documents_reach_the_template(live: Live) -> None:
    documents = ["a text", {"id": "d", "data": {"title": "T", "text": "of two"}}]
    post(live, "/v2/chat", ask("hi", documents=documents))
    wrong = post(live, "/v2/chat", ask("hi", documents=[{"id": "d", "data": 3}]), 400)
    assert wrong["error"]["param"] == "documents"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v2/chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ("/v2/chat", {"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages"),
        ("/v2/chat", {"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        (
            "/v2/chat",
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "messages",
        ),
        ("/v2/chat", {"tools": [{"type": "connector"}]}, "tools"),
        ("/v2/chat", {"tool_choice": "REQUIRED"}, "tool_choice"),
        ("/v2/chat", {"tool_choice": "auto"}, "tool_choice"),
        ("/v2/chat", {"thinking": {"type": "maybe"}}, "thinking"),
        ("/v2/chat", {"thinking": {"type": "enabled", "token_budget": -1}}, "thinking"),
        ("/v2/chat", {"citation_options": {"mode": "FAST"}}, "citation_options"),
        ("/v2/chat", {"response_format": {"type": "xml"}}, "response_format"),
        ("/v2/chat", {"p": 2}, "p"),
        ("/v1/chat", {"message": "x", "chat_history": [{"role": "user"}]}, "chat_history"),
        ("/v1/chat", {"message": "x", "tool_results": [{"call": {}}]}, "tool_results"),
        ("/v1/chat", {"message": "x", "connectors": [{"id": "web-search"}]}, "connectors"),
        (
            "/v1/chat",
            {"message": "x", "tools": [{"name": "a", "parameter_definitions": {"b": {}}}]},
            "tools",
        ),
    ],
)
def test_errors_name_the_field(live: Live, path: str, fields: dict[str, Any], param: str) -> None:
    body = {**ask("hi"), **fields} if path == "/v2/chat" else fields
    answer = post(live, path, body, 400)
    assert answer["error"]["param"] == param
    assert answer["message"] == answer["error"]["message"]
