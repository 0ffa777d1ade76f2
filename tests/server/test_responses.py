"""The responses API through the official client."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from modulm.errors import ConfigError
from modulm_route_responses.conversations import Conversation
from modulm_route_responses.events import Log
from modulm_route_responses.flags import ResponsesConfig
from modulm_route_responses.prompts import StoredPrompts
from modulm_route_responses.store import Store, Stored
from modulm_server.testing import Live, error_of

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
    numbers, kinds, streamed = [], [], ""
    final: Any = None
    for event in client.responses.create(**options, stream=True):
        numbers.append(event.sequence_number)
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            streamed += event.delta
        if event.type == "response.completed":
            final = event.response
    assert numbers == list(range(len(numbers)))
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")
    assert streamed == whole.output_text == final.output_text
    drop = {"id", "call_id"}
    assert [i.model_dump(exclude=drop) for i in final.output] == [
        i.model_dump(exclude=drop) for i in whole.output
    ]
    assert final.usage == whole.usage


@pytest.mark.parametrize("logprobs", [False, True])
def test_messages_as_the_model_reads_and_writes_them(
    client: openai.OpenAI, live: Live, logprobs: bool
) -> None:
    """vLLM's `enable_response_messages`: the prompt and the answer, with their tokens."""
    options: Any = {"model": "M", "input": "think first", "top_logprobs": int(logprobs) or None}
    more = {"extra_body": {"enable_response_messages": True}}
    whole = client.responses.create(**options, **more)
    prompt, answer = whole.input_messages[0], whole.output_messages[0]
    seen = live.engine.seen[-1][0]
    assert prompt["message"] == seen["prompt"]
    assert prompt["tokens"] == list(seen["prompt_token_ids"])
    assert prompt["type"] == answer["type"] == "raw_message_tokens"
    assert answer["message"].endswith(whole.output_text)
    assert whole.output[0].content[0].text in answer["message"]
    assert len(answer["tokens"]) == whole.usage.output_tokens
    *_, last = client.responses.create(**options, **more, stream=True)
    assert last.response.input_messages == whole.input_messages
    assert last.response.output_messages == whole.output_messages
    assert not hasattr(client.responses.create(**options), "input_messages")


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


def test_clients_may_choose_the_id(client: openai.OpenAI) -> None:
    chosen = {"request_id": "mine-1"}
    answer = client.responses.create(model="M", input="hi", extra_body=chosen)
    assert answer.id == "mine-1"
    assert client.responses.retrieve("mine-1").output_text == answer.output_text
    with pytest.raises(openai.BadRequestError, match="request_id: a response has this id"):
        client.responses.create(model="M", input="hi", extra_body=chosen)


def test_what_is_not_stored_is_gone(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="M", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="M", input="hi", previous_response_id=answer.id)


def test_in_the_background(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="M", input="hi", background=True)
    assert answer.status in ("queued", "in_progress")
    for _ in range(30_000):
        answer = client.responses.retrieve(answer.id)
        if answer.status == "completed":
            break
        time.sleep(0.01)
    assert answer.output_text == "Hello there."


def test_background_can_be_cancelled(client: openai.OpenAI, live: Live) -> None:
    answer = client.responses.create(model="M", input="count slowly", background=True)
    cancelled = client.responses.cancel(answer.id)
    assert cancelled.status == "cancelled"
    for _ in range(30_000):
        if not live.engine.active:
            break
        time.sleep(0.01)
    assert live.engine.active == 0


def test_background_can_be_streamed_and_read_again(client: openai.OpenAI) -> None:
    options: Any = {"model": "M", "input": "think first", "background": True}
    events = list(client.responses.create(**options, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    name = events[0].response.id  # type: ignore[union-attr]
    assert list(client.responses.retrieve(name, stream=True)) == events
    for after in (0, 4, len(events) - 1, len(events) + 5):
        rest = list(client.responses.retrieve(name, stream=True, starting_after=after))
        assert rest == events[after + 1 :]
    stored = client.responses.retrieve(name)
    assert stored == events[-1].response  # type: ignore[union-attr]
    assert stored.output_text == "It is 4."
    assert stored.usage is not None
    assert 0 < stored.usage.output_tokens_details.reasoning_tokens < stored.usage.output_tokens


def test_a_reader_may_leave_and_come_back(client: openai.OpenAI, live: Live) -> None:
    options: Any = {"model": "M", "input": "count slowly", "max_output_tokens": 40}
    with client.responses.create(**options, background=True, stream=True) as stream:
        first = [next(stream) for _ in range(6)]
    name = first[0].response.id  # type: ignore[union-attr]
    after = first[-1].sequence_number
    rest = list(client.responses.retrieve(name, stream=True, starting_after=after))
    assert rest[0].sequence_number == after + 1
    assert rest[-1].type == "response.incomplete"
    text = "".join(e.delta for e in [*first, *rest] if e.type == "response.output_text.delta")
    assert text == client.responses.retrieve(name).output_text


def test_a_cancelled_stream_ends(client: openai.OpenAI) -> None:
    options: Any = {"model": "M", "input": "count slowly", "background": True}
    with client.responses.create(**options, stream=True) as stream:
        name = next(stream).response.id  # type: ignore[union-attr]
        while next(stream).type != "response.output_text.delta":
            pass
        cancelled = client.responses.cancel(name)
        last = list(stream)[-1]
    assert last.type == "response.cancelled"
    assert cancelled.status == "cancelled"
    assert cancelled.output_text
    assert client.responses.cancel(name).status == "cancelled"


def test_a_failure_in_the_background_is_streamed(client: openai.OpenAI) -> None:
    options: Any = {"model": "M", "input": "fail late", "background": True}
    last = list(client.responses.create(**options, stream=True))[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message


def test_numbers_go_on_in_an_error(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="M", input="fail late", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_events_are_kept_for_some(http: httpx.Client) -> None:
    response_id = http.post(URL, json={"model": "M", "input": "hi"}).json()["id"]
    for query, param in (
        ("stream=true", "stream"),
        ("starting_after=3", "starting_after"),
        ("stream=true&starting_after=x", "starting_after"),
    ):
        answer = http.get(f"{URL}/{response_id}?{query}")
        assert answer.status_code == 400
        assert error_of(answer)["param"] == param


def test_the_oldest_events_are_forgotten() -> None:
    store = Store(max_frames=3)
    logs = [Log() for _ in range(3)]
    stored = [
        Stored("", {"id": str(index), "status": "completed"}, log=log)
        for index, log in enumerate(logs)
    ]
    for one, log in zip(stored, logs, strict=True):
        log.add(b"1")
        log.add(b"2")
        store.put(one)
    logs[1].close()
    logs[2].close()
    store.trim()
    assert [one.log for one in stored] == [logs[0], None, None]


def test_input_items(client: openai.OpenAI, http: httpx.Client) -> None:
    first = client.responses.create(model="M", input="one")
    new_input: Any = [{"role": "user", "content": "two"}, {"role": "user", "content": "three"}]
    second = client.responses.create(model="M", input=new_input, previous_response_id=first.id)
    items: Any = list(client.responses.input_items.list(second.id, order="asc"))
    texts = [item.content[0].text for item in items]
    assert texts == ["one", "Hello there.", "two", "three"]
    paged: Any = list(client.responses.input_items.list(second.id, limit=1))
    assert paged == items[::-1]
    assert len({item.id for item in items}) == 4
    for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after")):
        answer = http.get(f"{URL}/{second.id}/input_items?{query}")
        assert error_of(answer)["param"] == param


def test_input_tokens(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model="M", input="hi", tools=[TOOL])
    answer = client.responses.create(model="M", input="hi", tools=[TOOL])
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens


def test_a_long_conversation_can_be_truncated(client: openai.OpenAI, live: Live) -> None:
    turns: Any = [{"role": "user", "content": f"turn {turn}: {'word ' * 30}"} for turn in range(9)]
    turns[6:6] = [
        {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    ]
    options: Any = {"model": "M", "input": turns, "instructions": "Be kind.", "max_tool_calls": 2}
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**options)
    answer = client.responses.create(**options, truncation="auto", max_output_tokens=20)
    assert (answer.truncation, answer.max_tool_calls) == ("auto", 2)
    prompt = live.engine.seen[-1][0]["prompt"]
    assert "Be kind." in prompt
    assert "turn 8" in prompt
    assert "turn 0" not in prompt
    assert ("sunny" in prompt) == ("get_weather" in prompt)
    too_much: Any = {"model": "M", "input": "word " * 400, "truncation": "auto"}
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**too_much)


def test_allowed_tools(client: openai.OpenAI, live: Live) -> None:
    other: Any = {**TOOL, "name": "get_time"}
    choice: Any = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "get_weather"}],
    }
    client.responses.create(model="M", input="hi", tools=[TOOL, other], tool_choice=choice)
    prompt = live.engine.seen[-1][0]["prompt"]
    assert "get_weather" in prompt
    assert "get_time" in prompt
    short: Any = [{"type": "function", "name": name} for name in ("get_weather", "get_time")]
    called = client.responses.create(
        model="M", input="call what is not allowed", tools=short, tool_choice=choice
    )
    assert [i.name for i in called.output if i.type == "function_call"] == ["get_weather"]
    client.responses.create(
        model="M", input="hi", tools=[TOOL, other], tool_choice={**choice, "mode": "required"}
    )
    tag = live.engine.seen[-1][1].structured_outputs.structural_tag
    assert '"get_weather\\"' in tag
    assert "get_time" not in tag


def test_failures(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="M", input="fail at once")
    answer = client.responses.create(model="M", input="fail at once", background=True)
    for _ in range(30_000):
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
        model="M", input="call in its own format", tools=[TOOL], tool_choice=choice
    )
    call: Any = answer.output[0]
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Bern"}')


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
        ({"truncation": "some"}, "truncation"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [5]}}, "tool_choice"),
        ({"conversation": 5}, "conversation"),
        ({"conversation": {"name": "x"}}, "conversation"),
        ({"conversation": "x", "previous_response_id": "y"}, "conversation"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"include": ["web_search_call.results"]}, "include"),
        ({"input": None}, "input"),
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
        response_id = client.post(URL, json={"model": "M", "input": "hi"}, headers=ann).json()["id"]
        assert client.get(f"{URL}/{response_id}", headers=ann).status_code == 200
        assert client.get(f"{URL}/{response_id}", headers=bob).status_code == 404
        chained = {"model": "M", "input": "hi", "previous_response_id": response_id}
        assert client.post(URL, json=chained, headers=bob).status_code == 404


LOGPROBS: Any = ["message.output_text.logprobs"]


@pytest.mark.parametrize("text", ["hi", "think first", "call a tool", "speak of emoji"])
def test_logprobs_of_texts(client: openai.OpenAI, live: Live, text: str) -> None:
    """Of the text alone: not of reasoning, calls or what ends an answer; streamed or not."""
    options: Any = {"model": "M", "input": text, "tools": [TOOL], "include": LOGPROBS}
    whole = client.responses.create(**options, top_logprobs=2)
    (part,) = [item.content[0] for item in whole.output if item.type == "message"]
    entries = part.logprobs  # type: ignore[union-attr]
    assert entries
    spelled = b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace")
    if text != "speak of emoji":  # tokens that are parts of characters have no text of their own
        assert part.text.strip() in spelled  # type: ignore[union-attr]
    assert "think" not in spelled
    assert "get_weather" not in spelled
    assert "<|im_end|>" not in spelled
    assert all(entry.logprob == -0.5 and len(entry.top_logprobs) == 2 for entry in entries)
    streamed: list[str] = []
    for event in client.responses.create(**options, top_logprobs=2, stream=True):
        if event.type == "response.output_text.delta":
            streamed += [entry.token for entry in event.logprobs]
        elif event.type == "response.output_text.done":
            assert [entry.token for entry in event.logprobs] == streamed
        elif event.type == "response.completed":
            final = event.response
    assert streamed == [entry.token for entry in entries]
    (text_part,) = [item.content[0] for item in final.output if item.type == "message"]
    assert text_part.logprobs == entries  # type: ignore[union-attr]


def test_logprobs_are_given_where_they_are_wanted(client: openai.OpenAI, live: Live) -> None:
    plain: Any = client.responses.create(model="M", input="hi").output[0]
    assert plain.content[0].logprobs is None
    assert live.engine.seen[-1][1].logprobs is None
    chosen: Any = client.responses.create(model="M", input="hi", include=LOGPROBS).output[0]
    assert [entry.top_logprobs for entry in chosen.content[0].logprobs] == [[]] * len(
        chosen.content[0].logprobs
    )
    best = client.responses.create(model="M", input="hi", top_logprobs=1)
    assert best.top_logprobs == 1
    assert best.output[0].content[0].logprobs  # type: ignore[union-attr]


def user(text: str) -> Any:
    return {"type": "message", "role": "user", "content": text}


def test_conversations(client: openai.OpenAI, live: Live) -> None:
    conversation = client.conversations.create(
        metadata={"topic": "x"}, items=[user("my name is Ann")]
    )
    assert client.conversations.retrieve(conversation.id) == conversation
    assert client.conversations.update(conversation.id, metadata={"a": "b"}).metadata == {"a": "b"}
    answer = client.responses.create(model="M", input="who am I?", conversation=conversation.id)
    assert answer.conversation is not None
    assert answer.conversation.id == conversation.id
    prompt = live.engine.seen[-1][0]["prompt"]
    assert prompt.index("Ann") < prompt.index("who am I?")
    items: Any = list(client.conversations.items.list(conversation.id, order="asc", limit=1))
    texts = [item.content[0].text for item in items]
    assert texts == ["my name is Ann", "who am I?", "Hello there."]
    assert [item.role for item in items] == ["user", "user", "assistant"]
    client.responses.create(
        model="M", input="think first", conversation={"id": conversation.id}, store=False
    )
    prompt = live.engine.seen[-1][0]["prompt"]
    assert prompt.index("who am I?") < prompt.index("Hello there.") < prompt.index("think first")
    stored = client.responses.input_items.list(answer.id, order="asc")
    assert [item.content[0].text for item in stored] == texts[:2]  # type: ignore[union-attr]
    added = client.conversations.items.create(conversation.id, items=[user("and now?")])
    (one,) = added.data
    assert client.conversations.items.retrieve(one.id or "", conversation_id=conversation.id) == one
    before = len(list(client.conversations.items.list(conversation.id)))
    client.conversations.items.delete(one.id or "", conversation_id=conversation.id)
    assert len(list(client.conversations.items.list(conversation.id))) == before - 1
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(one.id or "", conversation_id=conversation.id)
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="M", input="hi", conversation=conversation.id)
    assert caught.value.param == "conversation"
    assert client.responses.retrieve(answer.id).output_text == "Hello there."


def test_a_conversation_may_say_it_all(client: openai.OpenAI, live: Live) -> None:
    """Without input of its own, streamed and in the background; what fails is not said."""
    conversation = client.conversations.create(items=[user("hello you")])
    for _ in client.responses.create(model="M", conversation=conversation.id, stream=True):
        pass
    assert "hello you" in live.engine.seen[-1][0]["prompt"]
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="M", conversation=conversation.id, input="fail at once")
    late = client.responses.create(
        model="M", conversation=conversation.id, input="later", background=True
    )
    for _ in range(30_000):
        if client.responses.retrieve(late.id).status == "completed":
            break
        time.sleep(0.01)
    items: Any = list(client.conversations.items.list(conversation.id, order="asc"))
    assert [item.content[0].text for item in items] == [
        "hello you", "Hello there.", "later", "Hello there.",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": [{"role": "wizard", "content": "x"}]}, "items"),
        ("", {"items": [{"type": "item_reference", "id": "x"}]}, "items"),
        ("", {"items": [user("x")] * 21}, "items"),
        ("", {"metadata": {"a": 5}}, "metadata"),
        ("/{id}", {}, "metadata"),
        ("/{id}/items", {"items": []}, "items"),
        ("/{id}/items", {"items": [5]}, "items"),
    ],
)
def test_bad_conversations(
    client: openai.OpenAI, http: httpx.Client, path: str, body: Any, param: str
) -> None:
    conversation = client.conversations.create()
    answer = http.post(f"/v1/conversations{path.format(id=conversation.id)}", json=body)
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["param"] == param


@pytest.mark.exhaustive
def test_conversations_belong_to_a_key_and_are_not_endless(make_server: ServerMaker) -> None:
    live = make_server(api_key=("ann", "bob"))
    ann, bob = ({"Authorization": f"Bearer {name}"} for name in ("ann", "bob"))
    with live.client() as client:
        conversation_id = client.post("/v1/conversations", json={}, headers=ann).json()["id"]
        path = f"/v1/conversations/{conversation_id}"
        assert client.get(path, headers=ann).status_code == 200
        for one in (path, f"{path}/items", f"{path}/items/msg_1"):
            assert client.get(one, headers=bob).status_code == 404
        body = {"model": "M", "input": "hi", "conversation": conversation_id}
        assert client.post(URL, json=body, headers=bob).status_code == 404
        for _ in range(1000):
            client.post("/v1/conversations", json={}, headers=ann)
        assert client.get(path, headers=ann).status_code == 404
    conversation = Conversation("", {})
    conversation.add([{"id": str(index)} for index in range(10_005)])
    assert len(conversation.items) == 10_000
    assert conversation.items[0]["id"] == "5"


STORED = {
    "greet": {
        "instructions": "Speak {{ language }}.",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "I am {{name}}."}]}],
        "temperature": 0.25,
    },
    "greet@2": {"instructions": "Be brief.", "input": "hello"},
}


@pytest.fixture(scope="module")
def storing(make_server: ServerMaker, tmp_path_factory: pytest.TempPathFactory) -> Live:
    folder = tmp_path_factory.mktemp("prompts")
    for name, value in STORED.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return make_server(stored_prompts=str(folder))


def test_stored_prompts(storing: Live) -> None:
    with openai.OpenAI(base_url=f"{storing.url}/v1", api_key="x", max_retries=0) as client:
        values: Any = {
            "language": "{{name}} {% raw %}",
            "name": {"type": "input_text", "text": "Ann"},
        }
        prompt: Any = {"id": "greet", "variables": values}
        answer = client.responses.create(model="M", prompt=prompt, input="Who am I?")
        prompt_table, params = storing.engine.seen[-1]
        assert "Speak {{name}} {% raw %}." in prompt_table["prompt"], "what is put in is only text"
        assert prompt_table["prompt"].index("I am Ann.") < prompt_table["prompt"].index("Who am I?")
        assert params.temperature == 0.25
        assert answer.prompt is not None
        assert answer.prompt.id == "greet"
        client.responses.create(model="M", prompt=prompt, instructions="Be kind.", temperature=1)
        prompt_table, params = storing.engine.seen[-1]
        assert "Be kind." in prompt_table["prompt"]
        assert "Speak" not in prompt_table["prompt"]
        assert params.temperature == 1
        client.responses.create(model="M", prompt={"id": "greet", "version": "2"})
        assert "Be brief." in storing.engine.seen[-1][0]["prompt"]
        for name, version in (("other", None), ("greet", "3"), ("../greet", None)):
            missing: Any = {"id": name, "version": version}
            with pytest.raises(openai.NotFoundError) as caught:
                client.responses.create(model="M", prompt=missing)
            assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "prompt",
    [
        {},
        {"id": 5},
        {"id": "greet"},
        {"id": "greet", "variables": {"name": "x"}},
        {"id": "greet", "variables": {"name": "x", "language": "y", "more": "z"}},
        {"id": "greet", "variables": {"name": "x", "language": 5}},
        {"id": "greet", "variables": {"name": "x", "language": {"type": "input_image"}}},
        {"id": "greet", "variables": []},
        {"id": "greet", "version": 5},
        {"id": "greet", "colour": "red"},
        "greet",
    ],
)
def test_prompts_that_are_filled_in_wrongly(storing: Live, prompt: Any) -> None:
    with storing.client() as client:
        answer = client.post(URL, json={"model": "M", "input": "hi", "prompt": prompt})
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["param"] == "prompt"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a b.json", "{}"),
        ("a.json", "{"),
        ("a.json", "[]"),
        ("a.json", '{"stream": true}'),
        ("a.json", '{"temperature": 5}'),
        ("a.json", '{"input": [{"role": "wizard", "content": "x"}]}'),
    ],
)
def test_folders_of_prompts_that_cannot_be_used(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        StoredPrompts.of(ResponsesConfig(stored_prompts=str(tmp_path)))
    with pytest.raises(ConfigError, match="not a folder"):
        StoredPrompts.of(ResponsesConfig(stored_prompts=str(tmp_path / "no")))
