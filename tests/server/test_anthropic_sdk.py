"""The official Anthropic client against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from modulm_server.testing import Live

TOOL: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


@pytest.fixture
def client(live: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as client:
        yield client


def ask(text: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return {"model": "M", "max_tokens": 100, "messages": messages, **fields}


def test_a_message(client: anthropic.Anthropic, live: Live) -> None:
    message = client.messages.create(**ask("hi", system="Be kind."))
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == "Hello there."  # type: ignore[union-attr]
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 0
    assert "Be kind." in live.engine.seen[-1][0]["prompt"]


def test_limits_and_stop_sequences(client: anthropic.Anthropic) -> None:
    assert client.messages.create(**ask("hi", max_tokens=1)).stop_reason == "max_tokens"
    stopped = client.messages.create(**ask("stop at END", stop_sequences=["END"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")


def test_thinking(client: anthropic.Anthropic, live: Live) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    message = client.messages.create(**ask("think first", thinking=thinking))
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking.strip() == "Let me see."  # type: ignore[union-attr]
    message = client.messages.create(**ask("think first", thinking={"type": "disabled"}))
    assert [block.type for block in message.content] == ["text"]
    assert live.engine.seen[-1][0]["prompt"].endswith("</think>\n\n")


def test_tools(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**ask("call a tool", tools=[TOOL]))
    assert message.stop_reason == "tool_use"
    call: Any = message.content[-1]
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})


def test_forced_tools(client: anthropic.Anthropic, live: Live) -> None:
    named = {"type": "tool", "name": "get_weather"}
    call: Any = client.messages.create(
        **ask("named arguments", tools=[TOOL], tool_choice=named)
    ).content[0]
    assert call.input == {"city": "Oslo"}
    assert live.engine.seen[-1][1].structured_outputs.json == TOOL["input_schema"]
    call = client.messages.create(
        **ask("required calls", tools=[TOOL], tool_choice={"type": "any"})
    ).content[0]
    assert call.input == {"city": "Bern"}


def test_results_of_tools_reach_the_prompt(client: anthropic.Anthropic, live: Live) -> None:
    messages = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "One moment."},
                {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"},
                {"type": "text", "text": "Thanks."},
            ],
        },
    ]
    client.messages.create(model="M", max_tokens=10, messages=messages, tools=[TOOL])  # type: ignore[arg-type]
    prompt = live.engine.seen[-1][0]["prompt"]
    assert prompt.index('"city": "Rome"') < prompt.index("tool\nsunny") < prompt.index("Thanks.")


@pytest.mark.parametrize("text", ["hi", "think first", "call two tools", "speak of emoji"])
def test_stream_equals_whole(client: anthropic.Anthropic, text: str) -> None:
    whole = client.messages.create(**ask(text, tools=[TOOL]))
    with client.messages.stream(**ask(text, tools=[TOOL])) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    shown = [block.model_dump(exclude={"id"}) for block in final.content]
    expected = [block.model_dump(exclude={"id"}) for block in whole.content]
    for blocks in (shown, expected):
        for block in blocks:
            block.pop("parsed_output", None)
    assert shown == expected
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")


def test_count_tokens(client: anthropic.Anthropic, live: Live) -> None:
    count = client.messages.count_tokens(
        model="M", messages=[{"role": "user", "content": "hi"}], tools=[TOOL]
    )
    client.messages.create(**ask("hi", tools=[TOOL]))
    assert count.input_tokens == len(live.engine.seen[-1][0]["prompt_token_ids"])


def test_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ask("hi"), "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**ask("hi", extra_body={"temperature": 5}))
    with pytest.raises(anthropic.InternalServerError):
        client.messages.create(**ask("fail at once"))
    with pytest.raises(anthropic.APIError), client.messages.stream(**ask("fail late")) as stream:
        stream.until_done()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"tools": [{"name": "../x", "input_schema": {}}]}, "tools"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ({"tool_choice": {"type": "sometimes"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"thinking": {"type": "much"}}, "thinking"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"top_p": 0}, "top_p"),
    ],
)
def test_bad_fields(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/messages", json=ask("hi", **fields))
    assert answer.status_code == 400
    body = answer.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == param
