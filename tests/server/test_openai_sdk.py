"""The official client against a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from modulm_server.testing import Live

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["M"]
    assert client.models.retrieve("M").id == "M"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="M", messages=ask("hi"))
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Hello there.", "stop")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None


def test_stream_equals_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="M", messages=ask("speak of emoji"))
    pieces: list[str] = []
    usage = None
    reasons = []
    stream = client.chat.completions.create(
        model="M",
        messages=ask("speak of emoji"),
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if not chunk.choices:
            usage = chunk.usage
            continue
        pieces.append(chunk.choices[0].delta.content or "")
        reasons.append(chunk.choices[0].finish_reason)
    assert "".join(pieces) == whole.choices[0].message.content == "🎈 été 你好"
    assert all("\ufffd" not in piece for piece in pieces)
    assert usage == whole.usage
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}


def test_several_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="M", messages=ask("hi"), n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    ended = []
    for chunk in client.chat.completions.create(model="M", messages=ask("hi"), n=3, stream=True):
        ended += [c.index for c in chunk.choices if c.finish_reason]
    assert sorted(ended) == [0, 1, 2]


def test_logprobs(client: openai.OpenAI) -> None:
    options: Any = {"model": "M", "messages": ask("hi"), "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**options).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert "".join(entry.token for entry in whole.content).startswith("Hello there.")
    assert all(len(entry.top_logprobs) == 2 for entry in whole.content)
    streamed = []
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            if choice.logprobs is not None and choice.logprobs.content:
                streamed += choice.logprobs.content
    assert streamed == whole.content


def test_reasoning(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="M", messages=ask("think first"))
    message = answer.choices[0].message.model_dump()
    assert message["reasoning_content"].strip() == "Let me see."
    assert message["reasoning"] == message["reasoning_content"]
    assert message["content"].strip() == "It is 4."
    parts: dict[str, str] = {"content": "", "reasoning_content": ""}
    stream = client.chat.completions.create(model="M", messages=ask("think first"), stream=True)
    for chunk in stream:
        delta = chunk.choices[0].delta.model_dump()
        for name in parts:
            parts[name] += delta.get(name) or ""
    assert parts == {name: message[name] for name in parts}
    quiet = client.chat.completions.create(
        model="M", messages=ask("think first"), extra_body={"include_reasoning": False}
    )
    assert quiet.choices[0].message.model_dump()["reasoning"] is None


def streamed_calls(stream: Any) -> tuple[list[dict[str, Any]], str, list[str | None]]:
    calls: list[dict[str, Any]] = []
    text, reasons = "", []
    for chunk in stream:
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        reasons.append(choice.finish_reason)
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            calls[call.index]["arguments"] += call.function.arguments or ""
    return calls, text, reasons


def test_a128_tools_streamed_and_whole(client: openai.OpenAI) -> None:
    options: Any = {"model": "M", "messages": ask("call two tools"), "tools": [TOOL]}
    whole = client.chat.completions.create(**options).choices[0]
    assert whole.finish_reason == "tool_calls"
    calls_whole = whole.message.tool_calls
    assert calls_whole is not None
    assert [json.loads(call.function.arguments)["city"] for call in calls_whole] == [
        "Paris",
        "Rome",
    ]
    assert len({call.id for call in calls_whole}) == 2
    calls, text, reasons = streamed_calls(client.chat.completions.create(**options, stream=True))
    assert [c["arguments"] for c in calls] == [c.function.arguments for c in calls_whole]
    assert len({call["id"] for call in calls}) == 2
    assert "tool_call" not in text
    assert reasons[-1] == "tool_calls"
    single = client.chat.completions.create(**options, parallel_tool_calls=False).choices[0]
    assert len(single.message.tool_calls or []) == 1
    calls, _, _ = streamed_calls(
        client.chat.completions.create(**options, parallel_tool_calls=False, stream=True)
    )
    assert len(calls) == 1


def test_text_beside_a_call_is_kept(client: openai.OpenAI) -> None:
    message = client.chat.completions.create(
        model="M", messages=ask("call a tool"), tools=[TOOL]
    ).choices[0].message  # fmt: skip
    assert (message.content or "").strip() == "I will look."
    assert len(message.tool_calls or []) == 1


def test_tools_that_must_not_be_called_stay_text(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(
        model="M", messages=ask("call a tool"), tools=[TOOL], tool_choice="none"
    ).choices[0]
    assert not choice.message.tool_calls
    assert "<tool_call>" in (choice.message.content or "")


def test_a126_a_call_that_is_cut(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(
        model="M", messages=ask("call two tools"), tools=[TOOL], max_tokens=20
    ).choices[0]
    assert choice.finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls_use_a_grammar(client: openai.OpenAI, live: Live, stream: bool) -> None:
    def create(text: str, choice: Any) -> tuple[str, str, str]:
        options: Any = {"model": "M", "messages": ask(text), "tools": [TOOL]}
        response = client.chat.completions.create(**options, tool_choice=choice, stream=stream)
        if stream:
            calls, _, reasons = streamed_calls(response)
            return calls[0]["name"], calls[0]["arguments"], str(reasons[-1])
        answer = response.choices[0]
        call = answer.message.tool_calls[0].function
        return call.name, call.arguments, answer.finish_reason

    def held() -> Any:
        """What the grammar holds the answer to."""
        return json.loads(live.engine.seen[-1][1].structured_outputs.structural_tag)["format"]

    name, arguments, reason = create("call in its own format", "required")
    assert (name, json.loads(arguments), reason) == ("get_weather", {"city": "Bern"}, "tool_calls")
    begin, schema, end, *more = held()["elements"]
    assert begin["value"] == '<tool_call>\n{"name": "get_weather", "arguments": '
    assert schema["json_schema"] == TOOL["function"]["parameters"]
    assert end["value"] == "}\n</tool_call>"
    assert [(each["type"], each["max"]) for each in more] == [("repeat", 63)]
    named_tool = {"type": "function", "function": {"name": "get_weather"}}
    name, arguments, reason = create("call in its own format", named_tool)
    assert (name, json.loads(arguments), reason) == ("get_weather", {"city": "Bern"}, "stop")
    assert len(held()["elements"]) == 3, "one call"


def test_response_formats_become_constraints(client: openai.OpenAI, live: Live) -> None:
    schema = {"type": "object"}
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    client.chat.completions.create(model="M", messages=ask("hi"), response_format=response_format)
    assert live.engine.seen[-1][1].structured_outputs.json == schema
    whole: Any = {"type": "json_object"}
    client.chat.completions.create(model="M", messages=ask("hi"), response_format=whole)
    assert live.engine.seen[-1][1].structured_outputs.json_object is True
    tag: Any = {"type": "structural_tag", "format": {"type": "any_text"}}
    client.chat.completions.create(model="M", messages=ask("hi"), response_format=tag)
    assert json.loads(live.engine.seen[-1][1].structured_outputs.structural_tag) == tag


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_json": {"type": "object"}}, "json", {"type": "object"}),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    ],
)
def test_guided_fields_of_older_clients(
    client: openai.OpenAI, live: Live, fields: Any, kind: str, value: Any
) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    client.chat.completions.create(model="M", messages=messages, extra_body=fields)
    assert getattr(live.engine.seen[-1][1].structured_outputs, kind) == value
    client.completions.create(model="M", prompt="hi", extra_body=fields)
    assert getattr(live.engine.seen[-1][1].structured_outputs, kind) == value
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="M", messages=messages, response_format={"type": "json_object"}, extra_body=fields
        )
    assert caught.value.param == f"guided_{kind}"


def test_a_message_can_be_continued(client: openai.OpenAI, live: Live) -> None:
    messages = [*ask("hi"), {"role": "assistant", "content": "Once upon"}]
    body = {"continue_final_message": True, "echo": True}
    answer = client.chat.completions.create(model="M", messages=messages, extra_body=body)
    assert live.engine.seen[-1][0]["prompt"].endswith("<|im_start|>assistant\nOnce upon")
    assert (answer.choices[0].message.content or "").startswith("Once uponHello")


def test_completions(client: openai.OpenAI) -> None:
    one = client.completions.create(model="M", prompt="say it", max_tokens=20)
    assert one.choices[0].text == "Hello there."
    many = client.completions.create(model="M", prompt=["a", "speak of emoji"], n=2, max_tokens=40)
    texts = [choice.text for choice in many.choices]
    assert texts == ["Hello there."] * 2 + ["🎈 été 你好"] * 2
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    ids = client.completions.create(model="M", prompt=[[5, 6], [7]], max_tokens=20)
    assert len(ids.choices) == 2


def test_completions_streamed(client: openai.OpenAI) -> None:
    options: Any = {"model": "M", "prompt": ["a", "speak of emoji"], "max_tokens": 40, "n": 2}
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    whole = client.completions.create(**options)
    assert texts == {choice.index: choice.text for choice in whole.choices}


def test_a072_echo(client: openai.OpenAI) -> None:
    plain = client.completions.create(model="M", prompt="abc", echo=True, max_tokens=0)
    assert (plain.choices[0].text, plain.choices[0].finish_reason) == ("abc", "length")
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 0
    scored = client.completions.create(model="M", prompt="abc", echo=True, max_tokens=2, logprobs=1)
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == scored.choices[0].text
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    for offset, token in zip(logprobs.text_offset or [], logprobs.tokens or [], strict=True):
        assert scored.choices[0].text[offset:].startswith(token)


def test_text_offsets_of_a_stream(client: openai.OpenAI) -> None:
    """They are those of the whole answer, also if text is kept back for a stop string."""
    options: Any = {"model": "M", "prompt": "stop at END", "max_tokens": 40, "stop": ["ND", "END"]}
    whole = client.completions.create(**options, logprobs=1).choices[0].logprobs
    assert whole is not None
    pieces = [c.choices[0] for c in client.completions.create(**options, logprobs=1, stream=True)]
    offsets = [o for p in pieces if p.logprobs is not None for o in p.logprobs.text_offset or []]
    assert offsets == whole.text_offset


def test_f36_stop_strings(client: openai.OpenAI) -> None:
    options: Any = {"model": "M", "prompt": "stop at END", "max_tokens": 40, "stop": ["ND", "END"]}
    whole = client.completions.create(**options).choices[0]
    assert (whole.text, whole.finish_reason) == ("before ", "stop")
    assert whole.model_dump()["stop_reason"] == "END"
    text = "".join(c.choices[0].text for c in client.completions.create(**options, stream=True))
    assert text == whole.text


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=ask("hi"))
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="M", messages=ask("hi"), temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="M", messages=ask("fail at once"))
    with pytest.raises(openai.APIError):
        for _ in client.chat.completions.create(model="M", messages=ask("fail late"), stream=True):
            pass


def test_token_ids_and_continuous_usage(client: openai.OpenAI, live: Live) -> None:
    body = {"return_token_ids": True}
    answer = client.chat.completions.create(model="M", messages=ask("hi"), extra_body=body)
    extra = answer.choices[0].model_extra or {}
    assert live.engine.tokenizer.decode(extra["token_ids"]) == "Hello there."
    stream = client.chat.completions.create(
        model="M",
        messages=ask("hi"),
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
    )
    usages = [c.usage.completion_tokens for c in stream if c.choices and c.usage]
    assert usages == sorted(usages)
    assert len(usages) > 2


def test_async_client_is_the_same(live: Live) -> None:
    asyncio.run(async_ask(live))


async def async_ask(live: Live) -> None:
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(model="M", messages=ask("hi"))
    assert answer.choices[0].message.content == "Hello there."


CLOCK: Any = {"type": "function", "function": {"name": "get_time"}}


def only(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("stream", [False, True])
def test_allowed_tools(client: openai.OpenAI, live: Live, stream: bool) -> None:
    """All tools stay in the prompt; only those that are allowed are called."""
    options: Any = {
        "model": "M",
        "tools": [CLOCK, TOOL],
        "tool_choice": only("auto", "get_weather"),
    }
    options["messages"] = ask("call what is not allowed")
    calls: list[tuple[int, str]] = []
    text = ""
    if stream:
        for chunk in client.chat.completions.create(**options, stream=True):
            text += chunk.choices[0].delta.content or ""
            new = chunk.choices[0].delta.tool_calls or ()
            calls += [(call.index, call.function.name) for call in new if call.function.name]
            reason = chunk.choices[0].finish_reason
    else:
        choice = client.chat.completions.create(**options).choices[0]
        calls = [(i, call.function.name) for i, call in enumerate(choice.message.tool_calls or ())]
        text, reason = choice.message.content or "", choice.finish_reason
    assert calls == [(0, "get_weather")]
    assert reason == "tool_calls"
    assert "get_time" not in text
    prompt = live.engine.seen[-1][0]["prompt"]
    assert "get_time" in prompt
    assert "get_weather" in prompt


def test_required_of_allowed_tools(client: openai.OpenAI, live: Live) -> None:
    answer = client.chat.completions.create(
        model="M",
        messages=ask("call in its own format"),
        tools=[CLOCK, TOOL],
        tool_choice=only("required", "get_weather"),
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Bern"}')  # type: ignore[union-attr]
    prompt, params = live.engine.seen[-1]
    assert "get_time" in prompt["prompt"]
    assert '"get_weather\\"' in params.structured_outputs.structural_tag
    assert "get_time" not in params.structured_outputs.structural_tag


@pytest.mark.parametrize("options", [{"continuous_usage_stats": True}, {"include_usage": True}])
def test_usage_where_it_was_asked_for(client: openai.OpenAI, options: Any) -> None:
    """Every chunk has the counts so far; `include_usage` is about a chunk of its own."""
    each = "continuous_usage_stats" in options
    for create, arguments in (
        (client.chat.completions.create, {"messages": ask("count slowly"), "n": 2}),
        (client.completions.create, {"prompt": ["a", "b"]}),
    ):
        create_any: Any = create
        chunks = list(
            create_any(model="M", max_tokens=5, stream=True, stream_options=options, **arguments)
        )
        *ordinary, last = chunks
        assert bool(last.choices) == each
        assert all((chunk.usage is not None) == each for chunk in ordinary)
        assert last.usage is not None
        if each:
            assert chunks[0].usage.prompt_tokens > 0
            assert max(chunk.usage.completion_tokens for chunk in chunks) == 5


def test_seeds_are_signed(client: openai.OpenAI, live: Live) -> None:
    for seed in (-1, -(2**63), 2**63 - 1):
        client.chat.completions.create(model="M", messages=ask("hi"), seed=seed)
        assert live.engine.seen[-1][1].seed == seed
        client.responses.create(model="M", input="hi", extra_body={"seed": seed})
        assert live.engine.seen[-1][1].seed == seed
