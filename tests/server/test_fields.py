"""Fields of completions and chat, good and bad (reference cases A040 to A130)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest
from samples import parametrize_sample

from modulm.contracts.outputs import RequestOutput
from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import CheckpointError, RequestError
from modulm_server.errors import describe, error_body
from modulm_server.generation import Running
from modulm_server.testing import Live, error_of

ServerMaker = Callable[..., Live]

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": "M", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    COMPLETE: {"model": "M", "prompt": "hi", "max_tokens": 4},
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


#: Schemas that describe the arguments of no call.
WRONG_PARAMETERS: list[Any] = [
    "x", [1], True, {"type": "string"}, {"type": ["null"]}, {"type": 5}, {"properties": ["city"]},
    {"properties": {"city": "string"}}, {"properties": {}, "required": "city"}, {"required": [1]},
]  # fmt: skip


def short(value: Any) -> str:
    """A value in the name of a test."""
    try:
        return f"{value!r:.24}"
    except RecursionError:
        return "deep"


#: field -> values that both routes refuse, naming the field
BAD_IN_BOTH: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.01, "0.5", True, [], {}],
    "top_p": [0, -1, 1.0001, "1"],
    "top_k": [-2, 1.5, True, "5"],
    "min_p": [-0.1, 1.1],
    "presence_penalty": [-2.1, 2.1, "0"],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1, "x"],
    "n": [0, -1, 1.5, True, 129, 10**9, "2"],
    "best_of": [10**9, 0],
    "max_tokens": [-1, "4", 1.5, True],
    "min_tokens": [-1, 5, "1"],
    "stop": ["", ["a", ""], [str(i) for i in range(65)], "x" * 1_000_000, [1], 7],
    "stop_token_ids": [[-1], [512], [2**40], ["a"], [True], "x"],
    "logit_bias": [
        {"-1": 1}, {"999999999": 1}, {"a": 1}, {"5": 101}, {"5": "x"}, {"1.5": 1},
        {str(i): 0 for i in range(100_000)}, [],
    ],
    "allowed_token_ids": [[], [-1], [512], ["a"]],
    "bad_words": [[""], [1], "x" * 3],
    "seed": [-(2**63) - 1, 2**63, "a", 1.5, True, 2**64],
    "prompt_logprobs": [-2, 21, "1"],
    "truncate_prompt_tokens": [-2, 0, 10**9, "x"],
    "cache_salt": ["", "a" * 1_000_000, "a@b", "a\nb", 5],
    "priority": [-(2**63), 2**63, "high", 1],
    "stream": ["yes", 1],
    "stream_options": [{"include_usage": True}, "x", []],
    "model": [None, 5],
    "user": ["x" * 1_000_000, 5],
    "request_id": ["x" * 10_000, 5],
    "use_beam_search": ["yes", 1],
    "length_penalty": [2.0, "x"],
    "early_stopping": [True, "always"],
    "logprob_token_ids": [list(range(129)), [-1]],
    "logits_processors": [["os.system"], "os.system"],
    "response_format": [
        "json", {"type": "sound"}, {}, {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {}}, {"type": "json_object", "schema": 123},
        {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}},
        {"type": "json_schema", "json_schema": {"schema": [1]}},
        {"type": "json_schema", "json_schema": {"schema": deep(100)}},
        {"type": "structural_tag"},
    ],
    "structured_outputs": [
        {}, {"json": {}, "regex": "a"}, {"choice": []}, {"choice": [""]}, {"choice": "abc"},
        {"choice": ["x"] * 100_000}, {"grammar": ""}, {"regex": ""}, {"json": "{"}, {"json": 5},
        {"nonsense": 1}, {"json": deep(100)}, {"grammar": "x" * 2_000_000},
    ],
}  # fmt: skip
BAD_IN_CHAT: dict[str, list[Any]] = {
    "messages": [
        None, "x", [], [123], [{}], [{"role": 123}], [{"role": "system", "content": 123}],
        [{"role": "wizard", "content": "x"}], [{"role": "user"}],
        [{"role": "tool", "content": "x"}], [{"role": "user", "content": "a"}] * 20_000,
        [{"role": "user", "content": [{"type": "x"}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        [{"role": "assistant", "tool_calls": [{}]}],
    ],
    "max_completion_tokens": [0, -1, "4"],
    "logprobs": [1, "yes"],
    "top_logprobs": [-1, 5],
    "tools": [
        *([tool(parameters=schema)] for schema in WRONG_PARAMETERS),
        "x", [5], [{}], [{"type": "function"}], [tool(name="../x")], [tool(name="x" * 65)],
        [tool(name="")], [tool(), tool()], [tool(parameters=5)], [tool(parameters=deep(150))],
        [tool(name=f"f{i}") for i in range(10_000)], [{"type": "web", "function": {"name": "f"}}],
    ],
    "tool_choice": [
        "required", "sometimes", {"type": "function", "function": {"name": "g"}}, 5,
        {"type": "allowed_tools"}, {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}},
        {"type": "allowed_tools", "allowed_tools": 5},
    ],
    "metadata": [
        {"a": "x" * 1_000_000}, {str(i): "x" for i in range(1000)}, {"a": 5}, "x",
    ],
    "modalities": [["audio"], "x"],
    "audio": [{"voice": "x"}],
    "prediction": [{"type": "content", "content": "x"}],
    "service_tier": ["x"],
    "functions": [[{"name": "f"}]],
    "chat_template": ["{{7*7}}"],
    "chat_template_kwargs": [
        {"tokenize": True}, {"return_tensors": "pt"}, {"return_dict": True}, {"padding": "x"},
        {"max_length": 10**9}, "x",
    ],
    "mm_processor_kwargs": [{"code_revision": "x"}],
    "media_io_kwargs": [{"max_frames": 10**9}],
    "documents": ["x", [5]],
}  # fmt: skip
BAD_IN_COMPLETIONS: dict[str, list[Any]] = {
    "prompt": [
        None, [], "", [[]], [""], [-1], [[-1]], [512], [999999], [1.5], [True], [2**40],
        ["a", 1], 5, {}, ["a"] * 100_000,
    ],
    "logprobs": [-1, 21, True, "1"],
    "max_tokens": [0],
    "suffix": ["x"],
    "prompt_embeds": ["AAAA"],
}  # fmt: skip

CASES = [
    *((path, field, value) for path in BASE for field, vs in BAD_IN_BOTH.items() for value in vs),
    *((CHAT, field, value) for field, values in BAD_IN_CHAT.items() for value in values),
    *((COMPLETE, field, value) for field, values in BAD_IN_COMPLETIONS.items() for value in values),
]


@parametrize_sample(
    ("path", "field", "value"),
    CASES,
    every=2,
    ids=[f"{p[4:8]}-{f}-{short(v)}" for p, f, v in CASES],
)
def test_bad_values_name_their_field(
    http: httpx.Client, live: Live, path: str, field: str, value: Any
) -> None:
    response = http.post(path, json={**BASE[path], field: value})
    assert response.status_code == 400, response.text[:300]
    error = error_of(response)
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) <= 2000
    assert live.engine.active == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_wrong_parameters_of_a_tool_are_named(http: httpx.Client, path: str) -> None:
    name = {"/v1/responses": "parameters", "/v1/messages": "input_schema"}.get(path)
    good = {"name": "g", name or "parameters": SCHEMA}
    for schema in WRONG_PARAMETERS:
        bad = {"name": "f", name or "parameters": schema}
        tools: list[dict[str, Any]] = [good, bad]
        if name is None:
            tools = [{"type": "function", "function": function} for function in tools]
        elif path == "/v1/responses":
            tools = [{"type": "function", **function} for function in tools]
        body = {**BASE[CHAT], "input": "hi", "tools": tools}
        response = http.post(path, json=body)
        assert response.status_code == 400, schema
        message = response.json()["error"]["message"]
        assert f"tools[1].{name or 'function.parameters'}" in message, message
        assert "must be" in message


@pytest.mark.parametrize("path", [*BASE, "/v1/responses", "/v1/messages"])
def test_requests_name_no_code(http: httpx.Client, path: str) -> None:
    """Not in a field that vLLM has; fields that nobody knows are named in the log."""
    body = BASE.get(path, {**BASE[CHAT], "input": "hi"})
    for more in ({}, {"use_beam_search": True, "n": 2} if path in BASE else {}):
        fields = {"logits_processors": ["os.system"], **more}
        response = http.post(path, json={**body, **fields})
        assert response.status_code == 400
        assert "a request cannot name code" in response.json()["error"]["message"]


def test_a043_a_schema_that_is_nested_for_ever(http: httpx.Client) -> None:
    schema = '{"properties":{"a":' * 1000 + "{}" + "}}" * 1000
    text = httpx.Request("POST", "http://x", json=BASE[CHAT]).content.decode()
    tools = f'[{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}]'
    response = http.post(
        CHAT,
        content=f'{text[:-1]}, "tools": {tools}}}',
        headers={"Content-Type": "application/json"},
    )
    assert response.status_code == 400
    error_of(response)


@pytest.mark.parametrize("path", BASE)
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_a046_numbers_that_json_has_not(
    http: httpx.Client, path: str, field: str, word: str
) -> None:
    text = httpx.Request("POST", "http://x", json=BASE[path]).content.decode()
    text = f'{text[:-1]}, "{field}": {word}}}'
    response = http.post(path, content=text, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["param"] == field


GOOD: list[tuple[str, dict[str, Any]]] = [
    *(
        (path, fields)
        for path in BASE
        for fields in [
            {"top_k": 0}, {"top_k": -1}, {"top_k": 9_999_999}, {"top_p": None}, {"top_p": 1e-9},
            {"temperature": 0}, {"temperature": 2}, {"n": 2, "best_of": 2}, {"n": 8},
            {"stop": []}, {"stop": None}, {"stop": [f"x{i}" for i in range(64)]},
            {"seed": 2**63 - 1}, {"seed": -(2**63)}, {"logit_bias": {"5": -100}}, {"priority": 0},
            {"cache_salt": "tenant-1"}, {"user": "somebody"}, {"stream_options": None},
            {"min_tokens": 4}, {"truncate_prompt_tokens": -1}, {"max_tokens": 10**6},
            {"max_tokens": None}, {"bad_words": ["no"]}, {"allowed_token_ids": [5, 6]},
            {"response_format": {"type": "text"}}, {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            {"structured_outputs": {"choice": ["a", "a", "b"]}},
            {"include_stop_str_in_output": True},
            {"vllm_xargs": {"a": 1}}, {"prompt_logprobs": 2}, {"return_token_ids": True},
        ]
    ),
    *(
        (CHAT, fields)
        for fields in [
            {"tools": [TOOL], "tool_choice": "none"}, {"tools": [TOOL]}, {"tools": []},
            {"logprobs": True, "top_logprobs": 20}, {"logprobs": True}, {"metadata": {"a": "b"}},
            {"max_completion_tokens": 4}, {"reasoning_effort": "low"}, {"modalities": ["text"]},
            {"chat_template_kwargs": {"enable_thinking": False}}, {"service_tier": "auto"},
            {"documents": [{"title": "a", "text": "b"}]}, {"parallel_tool_calls": False},
            {"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
            {"messages": [{"role": "user", "content": "\x00b\u202e\x1b[0m\ufffe" + "e\u0301" * 9}]},
        ]
    ),
    *(
        (COMPLETE, fields)
        for fields in [
            {"prompt": [5, 6]}, {"prompt": ["a", "b"]}, {"prompt": [[5], [6, 7]]}, {"logprobs": 0},
            {"echo": True, "max_tokens": 0}, {"echo": True, "max_tokens": 0, "logprobs": 1},
        ]
    ),
]  # fmt: skip


@parametrize_sample(
    ("path", "fields"), GOOD, every=3, ids=[f"{p[4:8]}-{short(f)}" for p, f in GOOD]
)
@pytest.mark.parametrize("stream", [False, True])
def test_good_values(http: httpx.Client, path: str, fields: dict[str, Any], stream: bool) -> None:
    if stream and fields.get("stream_options", 0) is None:
        fields = {"stream_options": {"include_usage": True}}
    if "prompt_logprobs" in fields:
        stream = False
    response = http.post(path, json={**BASE[path], **fields, "stream": stream})
    assert response.status_code == 200, response.text
    if stream:
        assert response.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in response.text


def test_a040_unknown_fields_are_logged_once(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "modulm_server"):
        assert http.post(CHAT, json={**BASE[CHAT], "foo": 1}).status_code == 200
    assert [r for r in caplog.records if "foo" in r.getMessage()]


@pytest.mark.parametrize("model", ["", "../../etc/passwd", "x" * 10_000])
def test_a075_models_that_are_not_served(http: httpx.Client, model: str) -> None:
    response = http.post(CHAT, json={**BASE[CHAT], "model": model})
    assert response.status_code == 404
    error = error_of(response)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert len(error["message"]) < 400


def test_without_a_model_the_only_one_answers(http: httpx.Client) -> None:
    body = {key: value for key, value in BASE[CHAT].items() if key != "model"}
    assert http.post(CHAT, json=body).json()["model"] == "M"


@pytest.mark.parametrize("path", BASE)
def test_a059_prompts_that_are_too_long(http: httpx.Client, path: str) -> None:
    long = "word " * 400
    fields = {CHAT: {"messages": [{"role": "user", "content": long}]}, COMPLETE: {"prompt": long}}
    response = http.post(path, json={**BASE[path], **fields[path]})
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == ("messages" if path == CHAT else "prompt")
    assert "256" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 4, "n": 2, "stream": True}, "best_of"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "response_format",
        ),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_a110_fields_that_contradict_each_other(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    response = http.post(CHAT, json={**BASE[CHAT], **fields})
    assert response.status_code == 400
    assert error_of(response)["param"] == param


@pytest.mark.parametrize("flags", [{}, {"tool_call_parser": "none", "reasoning_parser": "none"}])
def test_auto_needs_a_parser(make_server: ServerMaker, flags: dict[str, Any]) -> None:
    with make_server(**flags).client() as client:
        plain = client.post(CHAT, json=BASE[CHAT])
        assert plain.status_code == 200
        forced = client.post(CHAT, json={**BASE[CHAT], "tools": [TOOL], "tool_choice": "required"})
        assert forced.status_code == 200
        response = client.post(CHAT, json={**BASE[CHAT], "tools": [TOOL]})
        assert response.status_code == 400
        error = error_of(response)
        assert error["param"] == "tool_choice"
        assert "--tool-call-parser" in error["message"]


def test_a099_messages_are_not_templates(http: httpx.Client, live: Live) -> None:
    text = "{{7*7}}{% raw %}"
    body = {
        "messages": [{"role": "user", "content": text}],
        "tools": [tool(description="{{config}}")],
    }
    assert http.post(CHAT, json={**BASE[CHAT], **body}).status_code == 200
    prompt = live.engine.seen[-1][0]["prompt"]
    assert text in prompt
    assert "{{config}}" in prompt


def test_defaults_of_the_model_apply_where_nothing_is_asked(make_server: ServerMaker) -> None:
    live = make_server(info={"defaults": {"temperature": 0.3, "top_k": 7, "max_tokens": 5}})
    with live.client() as client:
        for path in BASE:
            body = {k: v for k, v in BASE[path].items() if k != "max_tokens"}
            client.post(path, json={**body, "top_k": 3})
            params = live.engine.seen[-1][1]
            assert (params.temperature, params.top_k, params.max_tokens) == (0.3, 3, 5)


def test_priority_with_a_policy_that_reads_it(make_server: ServerMaker) -> None:
    with make_server(scheduling_policy="priority").client() as client:
        assert client.post(CHAT, json={**BASE[CHAT], "priority": -5}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_samplers_of_packages_get_their_settings(live: Live, path: str) -> None:
    prompt: dict[str, Any] = {"prompt": "hello"}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "hello"}]}
    settings = {"dry_multiplier": 0.8, "dry_sequence_breakers": ["\n"], "xtc_probability": 0.5}
    off = {"mirostat": 0, "mirostat_tau": 3, "typical_p": 1, "top_n_sigma": -1}
    with live.client() as http:
        body = {**prompt, **settings, **off, "vllm_xargs": {"own": 1}}
        assert http.post(path, json=body).status_code == 200
        assert live.engine.seen[-1][1].extra_args == {"own": 1, **settings}
        beams = {"prompt": "hello", "use_beam_search": True, "n": 2, "typical_p": 0.5}
        answer = http.post("/v1/completions", json=beams)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "typical_p"


MORE = {
    "min_p": 0.1, "logit_bias": {"5": 1.5}, "stop_token_ids": [7], "ignore_eos": True,
    "include_stop_str_in_output": True, "skip_special_tokens": False,
    "spaces_between_special_tokens": False, "cache_salt": "salt", "xtc_probability": 0.5,
    "vllm_xargs": {"own": 1}, "structured_outputs": {"choice": ["a", "b"]},
}  # fmt: skip


def test_responses_take_vllms_fields(live: Live) -> None:
    with live.client() as http:
        answer = http.post("/v1/responses", json={"input": "hello", **MORE})
        assert answer.status_code == 200, answer.text
        params = live.engine.seen[-1][1]
        assert (params.min_p, params.stop_token_ids, params.ignore_eos) == (0.1, (7,), True)
        assert params.include_stop_str_in_output
        assert not params.skip_special_tokens
        assert not params.spaces_between_special_tokens
        assert params.extra_args == {"own": 1, "xtc_probability": 0.5}
        assert params.structured_outputs.choice == ["a", "b"]
        assert dict(params.logit_bias) in ({"5": 1.5}, {5: 1.5})
        assert live.engine.salts[-1].endswith("salt")
        for wrong in ({"min_p": 2}, {"priority": 3}, {"structured_outputs": {}}):
            answer = http.post("/v1/responses", json={"input": "hello", **wrong})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == next(iter(wrong))
        both = {"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}}
        assert http.post("/v1/responses", json={"input": "hello", **both}).status_code == 400


def test_messages_take_vllms_fields(live: Live) -> None:
    fields = {"cache_salt": "salt", "vllm_xargs": {"own": 1}, "dry_multiplier": 0.8}
    body = {
        "model": "M",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "hello"}],
        **fields,
    }
    with live.client() as http:
        answer = http.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        assert live.engine.seen[-1][1].extra_args == {"own": 1, "dry_multiplier": 0.8}
        assert live.engine.salts[-1].endswith("salt")
        counted = {}
        for thinks in (True, False):
            kwargs = {"chat_template_kwargs": {"enable_thinking": thinks}}
            count = {"model": "M", "messages": body["messages"], **kwargs}
            answer = http.post("/v1/messages/count_tokens", json=count)
            counted[thinks] = answer.json()["input_tokens"]
    assert counted[True] != counted[False]


def test_prompts_are_shown_and_cut_at_either_end(live: Live, tokenizer: Tokenizer) -> None:
    ids = list(tokenizer.encode("one two three four"))
    body = {"model": "M", "prompt": "one two three four", "return_token_ids": True}
    chat = {"model": "M", "messages": [{"role": "user", "content": "hello"}]}
    with live.client() as http:
        for side, kept in (("left", ids[-2:]), ("right", ids[:2]), (None, ids[-2:])):
            cut = {"truncate_prompt_tokens": 2, "truncation_side": side}
            answer = http.post("/v1/completions", json={**body, **cut}).json()
            assert answer["choices"][0]["prompt_token_ids"] == kept
        cut = {"truncate_prompt_tokens": -1, "truncation_side": "right"}
        error = http.post("/v1/completions", json={**body, **cut}).json()["error"]
        assert error["param"] == "truncate_prompt_tokens"
        shown = http.post("/v1/chat/completions/render", json=chat).json()["prompt"]
        for path, asked in ((COMPLETE, body), (CHAT, chat)):
            asked = {**asked, "return_token_offsets": True}
            answer = http.post(f"{path}/render", json=asked).json()
            (one,) = answer if isinstance(answer, list) else [answer]
            parts = [one["prompt"][start:end] for start, end in one["token_offsets"]]
            assert len(parts) == len(one["token_ids"])
            assert "".join(parts) == one["prompt"]
        whole = {**body, "prompt": ids, "return_token_offsets": True}
        (one,) = http.post(f"{COMPLETE}/render", json=whole).json()
        assert one["token_offsets"] is None
        chat["return_prompt_text"] = True
        assert http.post("/v1/chat/completions", json=chat).json()["prompt_text"] == shown
        stream = http.post("/v1/chat/completions", json={**chat, "stream": True}).text
        first, *rest = [json.loads(line[6:]) for line in stream.split("\n\n") if "{" in line]
        assert first["prompt_text"] == shown
        assert not any("prompt_text" in chunk for chunk in rest)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {}), (COMPLETE, {}), ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
        ("/v1/messages", {"messages": BASE[CHAT]["messages"], "max_tokens": 4}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_transfer_parameters_reach_the_engine_and_return(
    http: httpx.Client, live: Live, path: str, more: dict[str, Any]
) -> None:
    """As vLLM's proxies between engines send them."""
    asked = {"do_remote_decode": True}
    body = {**BASE.get(path, {"model": "M"}), **more, "kv_transfer_params": asked}
    answer = http.post(path, json=body).json()
    assert live.engine.seen[-1][1].extra_args == {"kv_transfer_params": asked}
    assert answer["kv_transfer_params"] == {"do_remote_prefill": True}
    text = http.post(path, json={**body, "stream": True}).text
    assert text.count('"kv_transfer_params":{"do_remote_prefill":true}') == 1
    body["kv_transfer_params"] = None
    assert "kv_transfer_params" not in http.post(path, json=body).text


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (CHAT, {"messages": BASE[CHAT]["messages"], "functions": [{"name": "f"}]}, "functions",
         "Not supported yet: functions. Use tools instead."),
        (CHAT, {"model": "M"}, "messages", "messages is required"),
        ("/v1/batches", {"input_file_id": "f", "endpoint": CHAT, "completion_window": "1h"},
         "completion_window", "completion_window must be one of 24h, not '1h'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_errors_say_what_to_send(
    http: httpx.Client, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param
    assert error_of(answer)["message"].startswith(message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty: send a JSON object"),
        (b'{"model": NaN}', "model is nan, which is not valid JSON: send a finite number"),
    ],
)
def test_bodies_that_are_no_json(http: httpx.Client, body: bytes, message: str) -> None:
    answer = http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, error_of(answer)["message"]) == (400, message)


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("POST", "/v1/chat/completion", 404, "; did you mean /v1/chat/completions?"),
        ("POST", "/v1/v1/models", 404, "; did you mean /v1/models?"),
        ("POST", "/sleep", 404, "no POST /sleep here; the server has it with --server-dev-mode"),
        ("POST", "/models/load", 404, "has it with --models-config or --models-dir"),
        ("POST", "/fine_tuning/jobs", 404, "; GET /docs lists the routes"),
        ("GET", "/v1/completions", 405, "/v1/completions takes POST, not GET"),
        ("POST", "/" + "x" * 5000, 404, "; GET /docs lists the routes"),
    ],
)
def test_unknown_routes_say_what_is_served(
    http: httpx.Client, method: str, path: str, status: int, message: str
) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    assert error_of(answer)["message"].endswith(message)


def test_errors_of_the_engine_name_the_request_fields() -> None:
    """An engine knows `structured_outputs` alone; clients may have sent an older field."""

    fields = {"structured_outputs": "guided_regex"}

    async def failing() -> AsyncGenerator[RequestOutput, None]:
        raise RequestError("structured_outputs.regex: Unclosed '['", "structured_outputs")
        yield

    with pytest.raises(RequestError, match=r"^guided_regex: Unclosed '\['$") as caught:
        asyncio.run(Running.start(failing(), lambda _: None, fields))
    assert caught.value.param == "guided_regex"


def test_a_checkpoint_that_lacks_something_is_said_so_without_its_path() -> None:
    answer = error_body(describe(CheckpointError("/srv/models/w: the vocabulary has no token <x>")))
    assert answer["error"]["message"] == "[...]: the vocabulary has no token <x>"
    assert answer["error"]["code"] == "checkpoint_error"
