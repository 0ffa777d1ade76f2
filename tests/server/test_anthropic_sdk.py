"""The official Anthropic client against a real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import pydantic
import pytest

from modulm_server.testing import Live

ServerMaker = Callable[..., Live]

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
    named_tool = {"type": "tool", "name": "get_weather"}
    call: Any = client.messages.create(
        **ask("call in its own format", tools=[TOOL], tool_choice=named_tool)
    ).content[0]
    assert call.input == {"city": "Bern"}
    tag = json.loads(live.engine.seen[-1][1].structured_outputs.structural_tag)
    assert tag["format"]["elements"][1]["json_schema"] == TOOL["input_schema"]
    call = client.messages.create(
        **ask("call in its own format", tools=[TOOL], tool_choice={"type": "any"})
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
    streamed = [block.model_dump(exclude={"id"}) for block in final.content]
    expected = [block.model_dump(exclude={"id"}) for block in whole.content]
    for blocks in (streamed, expected):
        for block in blocks:
            block.pop("parsed_output", None)
    assert streamed == expected
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


SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_output_config(client: anthropic.Anthropic, live: Live) -> None:
    form: Any = {"type": "json_schema", "schema": SCHEMA}
    message = client.messages.create(
        **ask("named arguments", output_config={"format": form, "effort": "low"})
    )
    assert message.content[0].text == '{"city": "Oslo"}'  # type: ignore[union-attr]
    assert live.engine.seen[-1][1].structured_outputs.json == SCHEMA
    client.messages.create(**ask("hi", extra_body={"output_format": form}))
    assert live.engine.seen[-1][1].structured_outputs.json == SCHEMA
    count = client.messages.count_tokens(
        model="M", messages=ask("hi")["messages"], output_config={"format": form}
    )
    assert count.input_tokens > 0


def test_parsing_into_a_class(client: anthropic.Anthropic) -> None:
    class Place(pydantic.BaseModel):
        city: str

    message = client.messages.parse(**ask("named arguments"), output_format=Place)
    assert message.parsed_output == Place(city="Oslo")


def test_models(client: anthropic.Anthropic, live: Live, http: httpx.Client) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == ("M", "model", "M")
    assert model.created_at.timestamp() == http.get("/v1/models/M").json()["created"]
    assert model.max_input_tokens == live.engine.info.max_model_len
    assert client.models.retrieve("M") == model
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.body["type"] == "error"  # type: ignore[index]


def test_models_page_by_page(make_server: ServerMaker) -> None:
    live = make_server(served_model_name=("a", "b", "c"))
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list(limit=1)] == ["a", "b", "c"]
        first = client.models.list(limit=2)
        assert (first.first_id, first.last_id, first.has_more) == ("a", "b", True)
        before = client.models.list(before_id="c", limit=1)
        assert (before.data[0].id, before.has_more) == ("b", True)
        with pytest.raises(anthropic.BadRequestError, match="after_id"):
            client.models.list(after_id="x")
        for limit in ("0", "1001", "x"):
            with pytest.raises(anthropic.BadRequestError, match="limit"):
                client.models.list(extra_query={"limit": limit})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"output_config": {"format": {"type": "poem"}}}, "output_config"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config"),
        ({"output_config": {"effort": "none"}}, "output_config"),
        ({"output_config": {"shape": "round"}}, "output_config"),
        ({"output_format": {"type": "json_schema", "schema": [1]}}, "output_format"),
        (
            {
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
                "tools": [TOOL],
                "tool_choice": {"type": "any"},
            },
            "output_config",
        ),
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
