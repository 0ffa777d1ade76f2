"""The responses API through the official client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from modulm.testing.server import Live, error_of

ServerMaker = Callable[..., Live]

URL = "/v1/responses"
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_create(client: openai.OpenAI, live: Live) -> None:
    answer = client.responses.create(model="M", input="hi", instructions="Be kind.")
    assert answer.output_text == "Hello there."
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.output_tokens > 0
    assert "Be kind." in live.engine.seen[-1][0]["prompt"]


@pytest.mark.parametrize("text", ["hi", "think first", "call two tools", "speak of emoji"])
def test_stream_equals_whole(client: openai.OpenAI, text: str) -> None:
    options: Any = {"model": "M", "input": text, "tools": [TOOL], "max_output_tokens": 100}
    whole = client.responses.create(**options)
    numbers, kinds, said = [], [], ""
    final: Any = None
    for event in client.responses.create(**options, stream=True):
        numbers.append(event.sequence_number)
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            said += event.delta
        if event.type == "response.completed":
            final = event.response
    assert numbers == list(range(len(numbers)))
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")
    assert said == whole.output_text == final.output_text
    drop = {"id", "call_id"}
    assert [i.model_dump(exclude=drop) for i in final.output] == [
        i.model_dump(exclude=drop) for i in whole.output
    ]
    assert final.usage == whole.usage


def test_reasoning_and_tools_are_items(client: openai.OpenAI) -> None:
    thought = client.responses.create(model="M", input="think first")
    assert [item.type for item in thought.output] == ["reasoning", "message"]
    called = client.responses.create(model="M", input="call two tools", tools=[TOOL])
    calls = [item for item in called.output if item.type == "function_call"]
    assert [call.arguments for call in calls] == ['{"city": "Paris"}', '{"city": "Rome"}']
    single = client.responses.create(
        model="M", input="call two tools", tools=[TOOL], parallel_tool_calls=False
    )
    assert len([item for item in single.output if item.type == "function_call"]) == 1


def test_results_of_tools(client: openai.OpenAI, live: Live) -> None:
    first = client.responses.create(model="M", input="call a tool", tools=[TOOL])
    call: Any = next(item for item in first.output if item.type == "function_call")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    client.responses.create(model="M", previous_response_id=first.id, input=[result], tools=[TOOL])
    prompt = live.engine.seen[-1][0]["prompt"]
    assert prompt.index("call a tool") < prompt.index("Paris") < prompt.index("tool\nsunny")


def test_turns_can_be_chained(client: openai.OpenAI, live: Live) -> None:
    first = client.responses.create(model="M", input="my name is Ann")
    second = client.responses.create(model="M", input="who am I?", previous_response_id=first.id)
    prompt = live.engine.seen[-1][0]["prompt"]
    assert prompt.index("Ann") < prompt.index("Hello there.") < prompt.index("who am I?")
    assert client.responses.retrieve(second.id).output_text == "Hello there."
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_what_is_not_stored_is_gone(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="M", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="M", input="hi", previous_response_id=answer.id)


def test_in_the_background(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="M", input="hi", background=True)
    assert answer.status in ("queued", "in_progress")
    for _ in range(200):
        answer = client.responses.retrieve(answer.id)
        if answer.status == "completed":
            break
        time.sleep(0.01)
    assert answer.output_text == "Hello there."


def test_background_can_be_cancelled(client: openai.OpenAI, live: Live) -> None:
    answer = client.responses.create(model="M", input="count slowly", background=True)
    cancelled = client.responses.cancel(answer.id)
    assert cancelled.status == "cancelled"
    for _ in range(200):
        if not live.engine.active:
            break
        time.sleep(0.01)
    assert live.engine.active == 0


def test_failures(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="M", input="fail at once")
    answer = client.responses.create(model="M", input="fail at once", background=True)
    for _ in range(200):
        answer = client.responses.retrieve(answer.id)
        if answer.status == "failed":
            break
        time.sleep(0.01)
    assert answer.error is not None
    events = list(client.responses.create(model="M", input="fail late", stream=True))
    assert events[-1].type == "error"


def test_cut_answers(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="M", input="hi", max_output_tokens=1)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_formats_and_forced_tools(client: openai.OpenAI, live: Live) -> None:
    schema = {"type": "object"}
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    client.responses.create(model="M", input="hi", text=text)
    assert live.engine.seen[-1][1].structured_outputs.json == schema
    choice: Any = {"type": "function", "name": "get_weather"}
    answer = client.responses.create(
        model="M", input="named arguments", tools=[TOOL], tool_choice=choice
    )
    call: Any = answer.output[0]
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Oslo"}')


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": "word " * 400}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "poem"}}}, "text"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "x"}, "conversation"),
        ({"background": True, "store": False}, "store"),
        ({"temperature": 5}, "temperature"),
        ({"metadata": {"a": "x" * 600}}, "metadata"),
    ],
)
def test_bad_fields(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post(URL, json={"model": "M", "input": "hi", **fields})
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["param"] == param


@pytest.mark.parametrize("name", ["*", "resp_", "resp_0", "%2e%2e"])
def test_a163_ids_are_whole_or_nothing(http: httpx.Client, name: str) -> None:
    assert http.post(URL, json={"model": "M", "input": "hi"}).status_code == 200
    assert http.get(f"{URL}/{name}").status_code == 404
    assert http.post(f"{URL}/{name}/cancel").status_code == 404
    assert http.delete(f"{URL}/{name}").status_code == 404


def test_a163_responses_belong_to_a_key(make_server: ServerMaker) -> None:
    live = make_server(api_key=("ann", "bob"))
    ann, bob = ({"Authorization": f"Bearer {name}"} for name in ("ann", "bob"))
    with live.client() as client:
        made = client.post(URL, json={"model": "M", "input": "hi"}, headers=ann).json()["id"]
        assert client.get(f"{URL}/{made}", headers=ann).status_code == 200
        assert client.get(f"{URL}/{made}", headers=bob).status_code == 404
        chained = {"model": "M", "input": "hi", "previous_response_id": made}
        assert client.post(URL, json=chained, headers=bob).status_code == 404
