"""Thinking over HTTP: effort, budgets, what is shown, what is counted, and in which order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from modulm.contracts.parser import Content, Reasoning, ToolArguments, ToolEnd, ToolStart
from modulm_route_openai.answers import split_in_order
from modulm_server.testing import Live

ServerMaker = Callable[..., Live]

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}
FLAT: Any = {"type": "function", **FUNCTION}
THEIRS: Any = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}
#: A template that shows what it is told.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}{% if m.reasoning_content %}({{ m.reasoning_content }})"
    "{% endif %} {{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.arguments.city }}>"
    "{% endfor %}]{% endfor %}{{ reasoning_effort }};{{ enable_thinking }};{{ thinking }}"
)


@pytest.fixture(scope="module")
def plain(make_server: ServerMaker) -> Live:
    """A server that shows prompts, and reads thoughts and calls."""
    return make_server(
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        chat_template=TEMPLATE,
        default_chat_template_kwargs={"enable_thinking": True},
        reasoning_effort_map={"minimal": "low"},
    )


@pytest.fixture(scope="module")
def deaf(make_server: ServerMaker) -> Live:
    """One that reads no thoughts."""
    return make_server()


@pytest.fixture
def chat(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def messages(live: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as client:
        yield client


def ask(text: str) -> Any:
    return [{"role": "user", "content": text}]


def posted(live: Live, path: str, **body: Any) -> httpx.Response:
    with live.client() as http:
        return http.post(path, json=body)


def prompt_of(live: Live, path: str, **body: Any) -> str:
    answer = posted(live, path, **body)
    assert answer.status_code == 200, answer.text
    prompt: str = live.engine.seen[-1][0]["prompt"]
    return prompt


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ask("think first")},
    RESPONSES: {"input": "think first"},
    MESSAGES: {"messages": ask("think first"), "max_tokens": 100},
}
#: What an answer that tells of thoughts has in it.
TOLD = {CHAT: '"reasoning":"', RESPONSES: '"type":"reasoning', MESSAGES: '"type":"thinking'}


# What is shown.


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_that_is_not_wanted_is_nowhere(live: Live, path: str, stream: bool) -> None:
    output = posted(live, path, stream=stream, **ASKED[path]).text
    hidden = posted(live, path, stream=stream, include_reasoning=False, **ASKED[path]).text
    assert TOLD[path] in output
    assert TOLD[path] not in hidden
    assert "see" not in hidden
    assert "4" in hidden


@pytest.mark.parametrize("stream", [False, True])
def test_neither_are_its_tokens(live: Live, stream: bool) -> None:
    fields = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True, "stream": stream}
    answer = posted(live, CHAT, include_reasoning=False, **fields, **ASKED[CHAT])
    bodies = [answer.json()] if not stream else chunks(answer.text)
    choices = [choice for one in bodies for choice in one["choices"]]
    tokens = [
        entry["token"] for c in choices for entry in (c["logprobs"] or {}).get("content") or ()
    ]
    ids = [token for c in choices for token in c.get("token_ids") or ()]
    assert "".join(tokens).strip().removesuffix("<|im_end|>") == "It is 4."
    decoded = live.engine.tokenizer.decode(ids)
    assert decoded.strip() == "It is 4."


def chunks(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_no_chunk_is_about_a_hidden_thought(live: Live) -> None:
    fields = {"stream": True, "return_token_ids": True, "logprobs": True, **ASKED[CHAT]}
    hidden = chunks(posted(live, CHAT, include_reasoning=False, **fields).text)
    empty = [
        choice for chunk in hidden for choice in chunk["choices"]
        if not choice["delta"] and not choice["finish_reason"] and not choice.get("token_ids")
    ]  # fmt: skip
    assert empty == []
    assert len(hidden) < len(chunks(posted(live, CHAT, **fields).text)) - 5


# What is counted.


def test_thoughts_are_counted(chat: openai.OpenAI, messages: anthropic.Anthropic) -> None:
    options: Any = {"model": "M", "messages": ask("think first")}
    whole = chat.chat.completions.create(**options).usage
    quiet = chat.chat.completions.create(**options, extra_body={"include_reasoning": False}).usage
    streamed = None
    for chunk in chat.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        streamed = chunk.usage or streamed
    assert whole is not None
    assert whole == quiet == streamed
    assert whole.completion_tokens_details is not None
    thought = whole.completion_tokens_details.reasoning_tokens
    assert thought is not None
    assert 3 <= thought < whole.completion_tokens - 3
    item = chat.responses.create(model="M", input="think first").usage
    assert item is not None
    assert item.output_tokens_details.reasoning_tokens == thought
    request: Any = {"model": "M", "max_tokens": 100, "messages": ask("think first")}
    theirs = messages.messages.create(**request).usage
    assert theirs.output_tokens_details is not None
    assert theirs.output_tokens_details.thinking_tokens == thought
    with messages.messages.stream(**request) as stream:
        final = stream.get_final_message().usage
    assert final.output_tokens_details == theirs.output_tokens_details
    plain = chat.chat.completions.create(model="M", messages=ask("hi")).usage
    assert plain is not None
    assert plain.completion_tokens_details is not None
    assert plain.completion_tokens_details.reasoning_tokens == 0


def test_nothing_is_counted_where_nothing_reads_thoughts(deaf: Live) -> None:
    assert "completion_tokens_details" not in posted(deaf, CHAT, **ASKED[CHAT]).json()["usage"]


# Effort.


def test_effort_reaches_the_template(plain: Live) -> None:
    for path, field in ((CHAT, "reasoning_effort"), (RESPONSES, "reasoning")):
        for effort, expected in (
            ("none", "none;False;False"), ("low", "low;True;True"), ("minimal", "low;True;True")
        ):  # fmt: skip
            arguments = {field: effort if path == CHAT else {"effort": effort}}
            assert prompt_of(plain, path, **ASKED[path], **arguments).endswith(f"]{expected}")
        assert prompt_of(plain, path, **ASKED[path]).endswith("];True;")
        explicit_kwargs = {
            "chat_template_kwargs": {"enable_thinking": "mine", "reasoning_effort": "high"}
        }
        arguments = {field: "none" if path == CHAT else {"effort": "none"}}
        assert prompt_of(plain, path, **ASKED[path], **arguments, **explicit_kwargs).endswith(
            "]high;mine;False"
        )
    effort = {"output_config": {"effort": "max"}}
    assert prompt_of(plain, MESSAGES, **ASKED[MESSAGES], **effort).endswith("]max;True;True")
    for thinking, expected in (
        ({"type": "disabled"}, ";False;False"),
        ({"type": "adaptive"}, "max;True;True"),
        ({"type": "enabled", "budget_tokens": 1024}, "max;True;True"),
    ):
        options = {**ASKED[MESSAGES], **effort, "thinking": thinking}
        assert prompt_of(plain, MESSAGES, **options).endswith(f"]{expected}")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"reasoning_effort": "much"}, "reasoning_effort"),
        (RESPONSES, {"reasoning": {"effort": "much"}}, "reasoning"),
        (RESPONSES, {"reasoning": {"effort": 5}}, "reasoning"),
        (RESPONSES, {"reasoning": {"summary": "long"}}, "reasoning"),
        (MESSAGES, {"output_config": {"effort": "none"}}, "output_config"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": "5"}}, "thinking"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking"),
        (MESSAGES, {"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking"),
        (MESSAGES, {"thinking": {"type": "enabled", "display": "loud"}}, "thinking"),
        (MESSAGES, {"thinking": {"type": "enabled", "much": 5}}, "thinking"),
        (CHAT, {"thinking_token_budget": -2}, "thinking_token_budget"),
        (CHAT, {"thinking_token_budget": 1.5}, "thinking_token_budget"),
        (CHAT, {"thinking_token_budget": True}, "thinking_token_budget"),
        (RESPONSES, {"thinking_token_budget": "5"}, "thinking_token_budget"),
    ],
)
def test_wrong_wishes_are_refused(
    live: Live, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = posted(live, path, **ASKED[path], **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


# Budgets.


def test_budgets_reach_the_engine(live: Live, deaf: Live) -> None:
    for path in (CHAT, RESPONSES):
        for budget in (0, 7, -1):
            answer = posted(live, path, **ASKED[path], thinking_token_budget=budget)
            assert answer.status_code == 200
            assert live.engine.seen[-1][1].thinking_token_budget == budget
        answer = posted(deaf, path, **ASKED[path], thinking_token_budget=7)
        assert answer.status_code == 400
        assert "--reasoning-parser" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "thinking_token_budget"
    options = {**ASKED[MESSAGES], "thinking": {"type": "enabled", "budget_tokens": 9}}
    for server, budget in ((live, 9), (deaf, None)):
        assert posted(server, MESSAGES, **options).status_code == 200
        assert server.engine.seen[-1][1].thinking_token_budget == budget
    completion = posted(live, "/v1/completions", prompt="hi", thinking_token_budget=3)
    assert completion.status_code == 200
    beams = {"use_beam_search": True, "n": 2, "thinking_token_budget": 3}
    assert posted(live, CHAT, **ASKED[CHAT], **beams).status_code == 400


# The order of thoughts and calls.


def test_a_stream_tells_thoughts_and_calls_in_order(chat: openai.OpenAI) -> None:
    kinds: list[str] = []
    texts: dict[str, str] = {}
    for chunk in chat.chat.completions.create(
        model="M", messages=ask("think between calls"), tools=[TOOL], stream=True
    ):
        delta = chunk.choices[0].delta
        thought = delta.model_dump().get("reasoning") or ""
        kinds += [f"call {call.index}" for call in delta.tool_calls or ()]
        if thought:
            kinds.append("thought")
        for name, text in (("thought", thought), ("content", delta.content or "")):
            texts[name] = texts.get(name, "") + text
    runs = [one for index, one in enumerate(kinds) if not index or kinds[index - 1] != one]
    assert runs == ["thought", "call 0", "thought", "call 1"]
    assert texts == {"thought": "First.Second.", "content": ""}


def test_one_delta_is_split_where_the_order_would_be_lost() -> None:
    call = [ToolStart(0, "f"), ToolArguments(0, "{}"), ToolEnd(0)]
    events: list[Any] = [Reasoning("a"), Content("b"), *call, Reasoning("c"), Content("d")]
    assert split_in_order(events) == [events[:5], events[5:]]
    assert split_in_order(events[:5]) == [events[:5]]
    assert split_in_order([Content("b"), Reasoning("a")]) == [[Content("b")], [Reasoning("a")]]
    assert split_in_order([]) == [[]]


def test_items_are_in_order_and_come_back_in_order(chat: openai.OpenAI, plain: Live) -> None:
    options: Any = {"model": "M", "input": "think between calls", "tools": [FLAT]}
    whole = chat.responses.create(**options)
    kinds = ["reasoning", "function_call", "reasoning", "function_call"]
    assert [item.type for item in whole.output] == kinds
    added, deltas = [], []
    for event in chat.responses.create(**options, stream=True):
        if event.type == "response.output_item.added":
            added.append(event.item.type)
        if event.type.endswith(".delta"):
            deltas.append(event.output_index)  # type: ignore[union-attr]
    assert added == kinds
    assert deltas == sorted(deltas)
    assert set(deltas) == {0, 1, 2, 3}
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"it is {index}"}
        for index, item in enumerate(i for i in whole.output if i.type == "function_call")
    ]
    items = [item.model_dump(exclude_none=True) for item in whole.output]
    prompt = prompt_of(plain, RESPONSES, input=[*ask("Both?"), *items, *outputs], tools=[FLAT])
    assert prompt.startswith(
        "[user Both?][assistant(First.) <Paris>][assistant(Second.) <Rome>]"
        "[tool it is 0][tool it is 1]"
    )


def test_blocks_are_in_order_and_come_back_in_order(
    messages: anthropic.Anthropic, plain: Live
) -> None:
    options: Any = {"model": "M", "max_tokens": 200, "tools": [THEIRS]}
    options["messages"] = ask("think between calls")
    whole = messages.messages.create(**options)
    kinds = ["thinking", "tool_use", "thinking", "tool_use"]
    assert [block.type for block in whole.content] == kinds
    with messages.messages.stream(**options) as stream:
        starts = [e.content_block.type for e in stream if e.type == "content_block_start"]
        final = stream.get_final_message()
    assert starts == kinds
    thoughts = [[b for b in m.content if b.type == "thinking"] for m in (whole, final)]
    assert [(t.thinking, t.signature) for t in thoughts[0]] == [
        (t.thinking, t.signature) for t in thoughts[1]
    ]
    assert [t.thinking for t in thoughts[0]] == ["First.", "Second."]
    signatures = {t.signature for t in thoughts[0]}
    assert len(signatures) == 2
    assert "" not in signatures
    blocks: list[Any] = [block.model_dump(exclude_none=True) for block in whole.content]
    redacted = {"type": "redacted_thinking", "data": "x"}
    calls = [block for block in blocks if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": f"it is {index}"}
        for index, call in enumerate(calls)
    ]
    prompt = prompt_of(
        plain, MESSAGES, max_tokens=9, tools=[THEIRS],
        messages=[
            *ask("Both?"), {"role": "assistant", "content": [redacted, *blocks]},
            {"role": "user", "content": results},
        ],
    )  # fmt: skip
    assert prompt.startswith(
        "[user Both?][assistant(First.) <Paris>][assistant(Second.) <Rome>]"
        "[tool it is 0][tool it is 1]"
    )


def test_thoughts_that_are_omitted_are_blocks_without_text(messages: anthropic.Anthropic) -> None:
    options: Any = {"model": "M", "max_tokens": 100, "messages": ask("think first")}
    options["thinking"] = {"type": "adaptive", "display": "omitted"}
    whole = messages.messages.create(**options).content
    with messages.messages.stream(**options) as stream:
        final = stream.get_final_message().content
    for blocks in (whole, final):
        thought: Any = blocks[0]
        assert (thought.type, thought.thinking, len(blocks)) == ("thinking", "", 2)
        assert thought.signature


# History.


def test_a_conversation_keeps_its_thoughts(chat: openai.OpenAI, plain: Live) -> None:
    message = (
        chat.chat.completions.create(model="M", messages=ask("think first")).choices[0].message
    )
    again = [*ask("One?"), message.model_dump(), *ask("Two?")]
    wanted = "[user One?][assistant(Let me see.) It is 4.][user Two?]"
    assert prompt_of(plain, CHAT, messages=again).startswith(wanted)
    first = posted(plain, RESPONSES, input="think first").json()
    for options in (
        {"previous_response_id": first["id"], "input": "Two?"},
        {"input": [*ask("One?"), *first["output"], *ask("Two?")]},
    ):
        prompt = prompt_of(plain, RESPONSES, **options)
        assert prompt.partition("]")[2].startswith(wanted.partition("]")[2])


def test_a_thought_is_told_from_what_is_said_after_it(plain: Live) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    part = {"type": "reasoning_text", "text": "Hm."}
    summary = {**thought, "summary": [{"type": "summary_text", "text": "Hm."}]}
    empty = {**thought, "encrypted_content": "gAAA"}
    answer = {"type": "message", "role": "assistant", "content": "Yes."}
    for items, rendered in (
        ([{**thought, "content": [part]}, answer], "[assistant(Hm.) Yes.]"),
        ([summary, answer], "[assistant(Hm.) Yes.]"),
        ([summary, summary, answer], "[assistant(Hm.Hm.) Yes.]"),
        ([empty, answer], "[assistant Yes.]"),
        ([answer, summary, answer], "[assistant Yes.][assistant(Hm.) Yes.]"),
    ):
        prompt = prompt_of(plain, RESPONSES, input=[*ask("One?"), *items, *ask("Two?")])
        assert prompt.startswith(f"[user One?]{rendered}[user Two?]")
