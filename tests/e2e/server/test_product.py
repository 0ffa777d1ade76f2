"""`modulm serve` with the embedded model, as `make serve` starts it, asked by official clients.

Nothing here is scripted: the process is the command line's, the model decides what it says, and
what is checked is what every answer must be.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Get the time in a city",
        "parameters": WEATHER["function"]["parameters"],
    },
}
CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]
ASKED: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
#: Newer Anthropic clients have no argument for it.
GREEDY = {"temperature": 0}
PERSON: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url(
    tmp_path_factory: pytest.TempPathFactory,
    serve_here: Callable[..., AbstractContextManager[str]],
) -> Iterator[str]:
    with serve_here(tmp_path_factory.mktemp("product") / "log") as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


# OpenAI: chat, completions, models


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


def test_chat_streamed_and_whole(client: openai.OpenAI) -> None:
    options: Any = {"model": "demo", "messages": CAPITAL, "temperature": 0}
    whole = client.chat.completions.create(**options)
    content = whole.choices[0].message.content
    assert content is not None
    assert "Paris" in content
    parts = []
    usage = None
    for chunk in client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        parts += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(parts) == content
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize(
    ("choice", "tools", "names"),
    [
        ("auto", [WEATHER], {"get_weather"}),
        ("required", [WEATHER, TIME], {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, [WEATHER, TIME], {"get_time"}),
    ],
)
def test_tools(client: openai.OpenAI, choice: Any, tools: Any, names: set[str]) -> None:
    options: Any = {"model": "demo", "messages": ASKED, "temperature": 0, "max_tokens": 200}
    answer = client.chat.completions.create(**options, tools=tools, tool_choice=choice)
    calls: Any = answer.choices[0].message.tool_calls
    assert calls
    assert {call.function.name for call in calls} <= names
    assert set(json.loads(calls[0].function.arguments)) == {"city"}
    streamed = ""
    for chunk in client.chat.completions.create(
        **options, tools=tools, tool_choice=choice, stream=True
    ):
        for call in chunk.choices[0].delta.tool_calls or ():
            if call.index == 0 and call.function is not None:
                streamed += call.function.arguments or ""
    assert json.loads(streamed) == json.loads(calls[0].function.arguments)


def test_tools_that_are_not_to_be_called(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=ASKED, tools=[WEATHER], tool_choice="none", max_tokens=40
    )
    assert not answer.choices[0].message.tool_calls


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_structured_output(client: openai.OpenAI, temperature: float) -> None:
    shape: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Who are you?"}],
        response_format=shape,
        temperature=temperature,
        seed=3,
        max_tokens=200,
    )
    person = json.loads(answer.choices[0].message.content or "")
    assert set(person) == {"name", "age"}
    assert isinstance(person["age"], int)


def test_a_schema_that_cannot_be_used_is_blamed_as_it_was_given(client: openai.OpenAI) -> None:
    schema: Any = {"name": "x", "schema": {"type": "nonsense"}}
    options: Any = {"response_format": {"type": "json_schema", "json_schema": schema}}
    with pytest.raises(openai.BadRequestError) as in_chat:
        client.chat.completions.create(model="demo", messages=CAPITAL, **options)
    with pytest.raises(openai.BadRequestError) as in_completion:
        client.completions.create(model="demo", prompt="x", extra_body=options)
    for error in (in_chat.value, in_completion.value):
        assert error.param == "response_format"
        assert "response_format.json: " in error.message


def test_completions(client: openai.OpenAI) -> None:
    options: Any = {"model": "demo", "prompt": "The capital of", "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**options, logprobs=2, echo=True)
    choice = whole.choices[0]
    assert choice.text.startswith("The capital of")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    streamed = client.completions.create(**options, stream=True)
    text = "".join(chunk.choices[0].text for chunk in streamed)
    assert "The capital of" + text == choice.text


def test_embeddings_of_a_model_that_writes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.embeddings.create(model="demo", input="hi")
    assert caught.value.status_code in (400, 404)
    assert caught.value.message
    assert "Traceback" not in caught.value.message


# OpenAI: responses, files, batches


def test_responses(client: openai.OpenAI) -> None:
    first = client.responses.create(model="demo", input=CAPITAL, temperature=0)
    assert "Paris" in first.output_text
    second = client.responses.create(
        model="demo", input="And of Italy?", previous_response_id=first.id, max_output_tokens=40
    )
    assert second.previous_response_id == first.id
    options: Any = {"model": "demo", "input": CAPITAL, "temperature": 0, "background": True}
    events = list(client.responses.create(**options, stream=True))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == first.output_text
    again = list(client.responses.retrieve(events[-1].response.id, stream=True, starting_after=2))
    assert again == events[3:]


class Verdict(BaseModel):
    yes: bool


def test_the_helpers_of_the_responses_client(client: openai.OpenAI) -> None:
    options: Any = {"model": "demo", "input": "Is Paris in France?", "max_output_tokens": 400}
    parsed = client.responses.parse(**options, temperature=0, text_format=Verdict)
    assert isinstance(parsed.output_parsed, Verdict)
    with client.responses.stream(**options, temperature=0, text_format=Verdict) as stream:
        assert [event.type for event in stream][-1] == "response.completed"
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    first_stream = client.responses.create(**options, background=True, stream=True)
    name = next(iter(first_stream)).response.id  # type: ignore[union-attr]
    first_stream.close()
    with client.responses.stream(response_id=name, starting_after=0) as stream:
        stream.until_done()
        assert stream.get_final_response().id == name


def test_responses_without_a_store(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **WEATHER["function"]}
    options: Any = {"model": "demo", "tools": [tool], "store": False, "temperature": 0}
    first = client.responses.create(**options, input=ASKED, include=["reasoning.encrypted_content"])
    call: Any = first.output[-1]
    assert call.type == "function_call"
    output_items = [item.model_dump(exclude_none=True) for item in first.output]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(**options, input=[*ASKED, *output_items, result])
    assert second.status == "completed"
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


def test_responses_call_functions(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **WEATHER["function"]}
    answer = client.responses.create(
        model="demo", input=ASKED, tools=[tool], tool_choice="required", temperature=0
    )
    call: Any = next(item for item in answer.output if item.type == "function_call")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    done = client.responses.create(
        model="demo",
        input=[result],
        tools=[tool],
        previous_response_id=answer.id,
        max_output_tokens=60,
    )
    assert done.status in ("completed", "incomplete")
    assert [item.type for item in client.responses.input_items.list(done.id, order="asc")] == [
        "message", *(item.type for item in answer.output), "function_call_output",
    ]  # fmt: skip


def test_files_and_batches(client: openai.OpenAI, tmp_path: Path) -> None:
    body = {"model": "demo", "messages": CAPITAL, "temperature": 0}
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for n in range(3)
    ]
    path = tmp_path / "batch.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with path.open("rb") as source:
        file = client.files.create(file=source, purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed"
    assert batch.output_file_id is not None
    rows = [json.loads(line) for line in client.files.content(batch.output_file_id).iter_lines()]
    assert sorted(row["custom_id"] for row in rows) == ["0", "1", "2"]
    for row in rows:
        assert "Paris" in row["response"]["body"]["choices"][0]["message"]["content"]


# Anthropic


def test_messages_streamed_and_whole(claude: anthropic.Anthropic) -> None:
    options: Any = {"model": "demo", "max_tokens": 60, "messages": CAPITAL, "extra_body": GREEDY}
    whole = claude.messages.create(**options)
    text = "".join(block.text for block in whole.content if block.type == "text")
    assert "Paris" in text
    with claude.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == text
        assert stream.get_final_message().usage == whole.usage
    counted = claude.messages.count_tokens(model="demo", messages=CAPITAL)
    assert counted.input_tokens == whole.usage.input_tokens


@pytest.mark.parametrize("kind", ["auto", "any", "tool"])
def test_messages_with_tools(claude: anthropic.Anthropic, kind: str) -> None:
    tool: Any = {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "input_schema": WEATHER["function"]["parameters"],
    }
    choice: Any = {"type": kind, **({"name": "get_weather"} if kind == "tool" else {})}
    message = claude.messages.create(
        model="demo",
        max_tokens=200,
        messages=ASKED,
        tools=[tool],
        tool_choice=choice,
        extra_body=GREEDY,
    )
    assert message.stop_reason == "tool_use"
    calls: Any = [block for block in message.content if block.type == "tool_use"]
    assert calls[0].name == "get_weather"
    assert set(calls[0].input) == {"city"}


def test_messages_with_thinking(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(
        model="demo",
        max_tokens=1100,
        messages=[{"role": "user", "content": "What is 23 plus 48?"}],
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert [block.type for block in message.content] == ["thinking", "text"]
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model="demo", max_tokens=0, messages=CAPITAL)


# curl


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl(url: str) -> None:
    body = json.dumps({"model": "demo", "messages": CAPITAL, "temperature": 0})
    ask = ["curl", "-sS", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"]

    def curl(*arguments: str) -> str:
        return subprocess.run(
            [*ask, *arguments], capture_output=True, text=True, check=True, timeout=300
        ).stdout

    content = json.loads(curl("-d", body))["choices"][0]["message"]["content"]
    assert "Paris" in content
    frames = curl("-N", "-d", json.dumps({**json.loads(body), "stream": True})).split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    deltas = [json.loads(frame[6:])["choices"][0]["delta"] for frame in frames[:-2]]
    assert "".join(delta.get("content") or "" for delta in deltas) == content
    refused = curl("-d", "{", "-w", "\n%{http_code}")
    error, status = refused.rsplit("\n", 1)
    assert status == "400"
    assert json.loads(error)["error"]["code"] == "invalid_json"
