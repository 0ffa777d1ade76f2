"""Responses and chats whose tools this server runs, with a real tool server over stdio and HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import tool_server
import uvicorn
import yaml
from samples import parametrize_sample

from modulm.config import EngineConfig
from modulm.errors import ConfigError
from modulm_server.flags import ServerConfig
from modulm_server.scripted import Reply, ScriptedEngine, scripted_info
from modulm_server.testing import Live, error_of, serve_in_thread
from modulm_server.tool_servers import (
    ServerSettings,
    ToolServer,
    ToolServerError,
    ToolServers,
    read_servers,
)

URL = "/v1/responses"
SCRIPT = str(Path(tool_server.__file__))


def call(name: str, **arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


CALLS = {
    "weather": call("get_weather", city="Paris"),
    "both": call("get_weather", city="Paris") + "\n" + call("get_weather", city="Rome"),
    "shout": call("shout", text="a"),
    "fail": call("fail"),
    "leave": call("leave"),
    "variables": call("variables"),
    "mine": call("get_time"),
}


def reply(prompt: str, params: Any) -> Reply:
    """Call the tool that the question names, until there is a result; "again" never stops."""
    for word, text in CALLS.items():
        if f"use {word}" in prompt and ("again" in prompt or "<tool_response>" not in prompt):
            return Reply(text)
    return Reply("Done.")


TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.role == 'tool' %}<tool_response>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}"
    "{{ call.function.arguments }}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def http_server() -> Iterator[str]:
    app = tool_server.make().streamable_http_app()
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/mcp"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def live(tokenizer, watched, http_server, tmp_path_factory) -> Iterator[Live]:
    file = tmp_path_factory.mktemp("tools") / "servers.yaml"
    local = {"command": [sys.executable, SCRIPT]}
    servers = {
        "local": local,
        "careful": {**local, "approval": "always", "tools": ["get_weather"]},
        "web": {"url": http_server, "tools": ["get_weather"]},
        "private": {**local, "keys": ["somebody"]},
        "broken": {"command": ["/nonexistent"]},
    }
    file.write_text(yaml.safe_dump({"servers": servers}))
    config = EngineConfig.from_keywords(
        model="M", disable_uvicorn_access_log=True, enable_auto_tool_choice=True,
        tool_call_parser="hermes", chat_template=TEMPLATE, tool_server=str(file),
        tool_result_bytes=100, tool_calls=4,
    )  # fmt: skip
    engine = ScriptedEngine(tokenizer, reply, scripted_info(tokenizer, config=config))
    with serve_in_thread(engine, config, watched) as server:
        yield server


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def tool(label: str = "local", **more: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": label, "require_approval": "never", **more}


@parametrize_sample("label", ["local", "web"], every=2)
def test_the_server_calls_the_tool_and_the_model_goes_on(client, live, label) -> None:
    options: Any = {"model": "M", "input": "use weather", "tools": [tool(label)]}
    answer = client.responses.create(**options)
    listed, made, _ = answer.output
    assert (listed.type, listed.server_label) == ("mcp_list_tools", label)
    assert (made.type, made.status, made.error) == ("mcp_call", "completed", None)
    assert json.loads(made.arguments) == {"city": "Paris"}
    assert made.output == "It rains in Paris."
    assert (answer.status, answer.output_text) == ("completed", "Done.")
    prompt = live.engine.seen[-1][0]["prompt"]
    assert "<tool_response>It rains in Paris." in prompt
    assert answer.usage.input_tokens > len(live.engine.seen[-1][0]["prompt_token_ids"])
    more = client.responses.create(
        model="M", input="thanks", previous_response_id=answer.id, tools=[tool(label)]
    )
    assert [item.type for item in more.output] == ["message"]  # the list is known
    assert "It rains in Paris." in live.engine.seen[-1][0]["prompt"]


def test_raw_messages_of_several_turns(client, live) -> None:
    """As in vLLM, the prompt of a later turn is among the output's messages."""
    answer = client.responses.create(
        model="M", input="use weather", tools=[tool()],
        extra_body={"enable_response_messages": True},
    )  # fmt: skip
    prompts = [prompt["prompt"] for prompt, *_ in live.engine.seen[-2:]]
    call, prompt, last = answer.output_messages
    assert [each["message"] for each in (*answer.input_messages, prompt)] == prompts
    assert "Paris" in call["message"]
    assert last["message"] == answer.output_text == "Done."
    made = len(call["tokens"]) + len(last["tokens"])
    assert made == answer.usage.output_tokens


def test_a_stream_tells_what_is_called(client) -> None:
    options: Any = {"model": "M", "input": "use both", "tools": [tool()], "stream": True}
    kinds, items, final = [], [], None
    for event in client.responses.create(**options):
        kinds.append(event.type)
        if event.type == "response.output_item.done":
            items.append(event.item)
        final = event
    assert kinds.count("response.mcp_call.in_progress") == 2
    assert kinds.count("response.mcp_call.completed") == 2
    assert kinds.count("response.mcp_call_arguments.done") == 2
    assert final.type == "response.completed"
    assert final.response.output == items
    assert [item.output for item in items[1:3]] == ["It rains in Paris.", "It rains in Rome."]


def test_calls_wait_for_approval(client, live) -> None:
    for label, approval in (("local", "always"), ("careful", "never")):
        tools: Any = [tool(label, require_approval=approval)]
        answer = client.responses.create(model="M", input="use weather", tools=tools)
        request = answer.output[-1]
        assert request.type == "mcp_approval_request"
        said: Any = {"type": "mcp_approval_response", "approval_request_id": request.id}
        for approve, result in ((False, "did not approve"), (True, "It rains in Paris.")):
            after = client.responses.create(
                model="M", input=[{**said, "approve": approve}], tools=tools,
                previous_response_id=answer.id,
            )  # fmt: skip
            made = after.output[0]
            assert (made.type, made.approval_request_id) == ("mcp_call", request.id)
            assert after.output_text == "Done."
            assert result in live.engine.seen[-1][0]["prompt"]
    wrong = live.client().post(
        URL, json={"model": "M", "input": [{**said, "approve": True}], "tools": tools}
    )
    assert error_of(wrong)["param"] == "input"


def test_only_some_tools_need_approval(client) -> None:
    tools: Any = [tool(require_approval={"never": {"tool_names": ["get_weather"]}})]
    answer = client.responses.create(model="M", input="use weather", tools=tools)
    assert answer.output[-1].type == "message"
    answer = client.responses.create(model="M", input="use shout", tools=tools)
    assert answer.output[-1].type == "mcp_approval_request"


@pytest.mark.parametrize(
    ("question", "status", "text"),
    [
        ("use shout", "completed", "cut: the result was longer"),
        ("use fail", "failed", "out of order"),
        ("use leave", "failed", "tool server local"),
        ("use weather", "completed", "It rains"),  # a new process
    ],
)
def test_results_are_limited_and_errors_reach_the_model(client, question, status, text) -> None:
    answer = client.responses.create(model="M", input=question, tools=[tool()])
    made = answer.output[1]
    assert made.status == status
    assert text in (made.output or made.error)
    assert len(made.output or "") < 200
    assert answer.output_text == "Done."


def test_the_servers_variables_stay_here(client, monkeypatch) -> None:
    monkeypatch.setenv("MODULM_SECRET_OF_THE_TEST", "x")
    answer = client.responses.create(model="M", input="use variables", tools=[tool()])
    assert "MODULM" not in answer.output[1].output


def test_a_response_ends_after_too_many_calls(client) -> None:
    answer = client.responses.create(
        model="M", input="use weather again", tools=[tool()], max_tool_calls=2
    )
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_tool_calls"
    assert [item.type for item in answer.output].count("mcp_call") == 2


def test_calls_of_the_clients_tools_end_the_turn(client) -> None:
    mine: Any = {"type": "function", "name": "get_time", "parameters": {"type": "object"}}
    answer = client.responses.create(model="M", input="use mine", tools=[tool(), mine])
    assert answer.output[-1].type == "function_call"


def test_chats_have_the_servers_calls(client, live) -> None:
    messages: Any = [{"role": "user", "content": "use both"}]
    options: Any = {"model": "M", "tools": [tool()]}
    answer = client.chat.completions.create(messages=messages, **options)
    message = answer.choices[0].message
    assert (message.content, message.tool_calls) == ("Done.", None)
    assert answer.choices[0].finish_reason == "stop"
    made = message.model_extra["mcp_calls"]
    assert [each["output"] for each in made] == ["It rains in Paris.", "It rains in Rome."]
    last = live.engine.seen[-1][0]
    assert "get_weather{'city': 'Paris'}get_weather{'city': 'Rome'}[tool]" in last["prompt"]
    assert answer.usage.prompt_tokens > len(last["prompt_token_ids"])
    messages += [message.model_dump(exclude_none=True), {"role": "user", "content": "thanks"}]
    client.chat.completions.create(messages=messages, **options)
    assert "<tool_response>It rains in Rome." in live.engine.seen[-1][0]["prompt"]
    streamed: list[Any] = []
    ends = []
    for chunk in client.chat.completions.create(messages=messages[:1], stream=True, **options):
        streamed += (chunk.choices[0].delta.model_extra or {}).get("mcp_calls", [])
        assert not chunk.choices[0].delta.tool_calls
        ends.append(chunk.choices[0].finish_reason)
    assert [each["output"] for each in streamed] == ["It rains in Paris.", "It rains in Rome."]
    assert [end for end in ends if end] == ["stop"]
    more: Any = {"stream_options": {"include_usage": True}, "extra_body": {"include_metrics": True}}
    *_, last = client.chat.completions.create(messages=messages[:1], stream=True, **more, **options)
    assert "metrics" in last.model_extra


def test_chats_wait_for_approval(client, live) -> None:
    options: Any = {"model": "M", "tools": [tool("careful")]}
    messages: Any = [{"role": "user", "content": "use weather"}]
    answer = client.chat.completions.create(messages=messages, **options)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    (request,) = message.model_extra["mcp_approval_requests"]
    assert request == {"id": call.id, "server_label": "careful", "name": "get_weather"}
    assert answer.choices[0].finish_reason == "tool_calls"
    messages.append(message.model_dump(exclude_none=True))
    said = {"role": "tool", "tool_call_id": call.id}
    declined: Any = [*messages, {**said, "approve": False}]
    client.chat.completions.create(messages=declined, **options)
    assert "<tool_response>the user did not approve" in live.engine.seen[-1][0]["prompt"]
    messages.append({**said, "approve": True})
    after = client.chat.completions.create(messages=messages, **options).choices[0].message
    (made,) = after.model_extra["mcp_calls"]
    assert (made["id"], made["output"]) == (call.id, "It rains in Paris.")
    messages += [after.model_dump(exclude_none=True), {"role": "user", "content": "thanks"}]
    client.chat.completions.create(messages=messages, **options)  # runs nothing again
    assert live.engine.seen[-1][0]["prompt"].count("It rains in Paris.") == 1
    del messages[3]["mcp_calls"]
    with pytest.raises(openai.BadRequestError, match="no later message has this call"):
        client.chat.completions.create(messages=messages, **options)


def test_chats_end_after_too_many_calls_and_at_the_clients(client) -> None:
    mine: Any = {"type": "function", "function": {"name": "get_time"}}
    options: Any = {"model": "M", "tools": [tool(), mine]}
    for question, reason in (("use weather again", "length"), ("use mine", "tool_calls")):
        messages: Any = [{"role": "user", "content": question}]
        answer = client.chat.completions.create(messages=messages, **options)
        assert answer.choices[0].finish_reason == reason
    assert [each.function.name for each in answer.choices[0].message.tool_calls] == ["get_time"]
    with pytest.raises(openai.BadRequestError, match="one choice"):
        client.chat.completions.create(messages=messages, n=2, **options)


SERVER: Any = {"type": "url", "name": "local"}
TOOLSET: Any = {"type": "mcp_toolset", "mcp_server_name": "local"}


@pytest.fixture
def messages(live: Live) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as client:
        yield client.beta.messages


def test_messages_have_the_servers_calls(messages, live) -> None:
    talk: Any = [{"role": "user", "content": "use both"}]
    options: Any = {
        "model": "M", "max_tokens": 500, "tools": [TOOLSET], "mcp_servers": [SERVER],
        "betas": ["mcp-client-2025-11-20"],
    }  # fmt: skip
    answer = messages.create(messages=talk, **options)
    pair = ["mcp_tool_use", "mcp_tool_result"]
    assert [block.type for block in answer.content] == [*pair, *pair, "text"]
    used, result = answer.content[:2]
    assert (used.server_name, used.name, used.input) == ("local", "get_weather", {"city": "Paris"})
    assert (result.tool_use_id, result.is_error) == (used.id, False)
    assert result.content[0].text == "It rains in Paris."
    assert (answer.content[-1].text, answer.stop_reason) == ("Done.", "end_turn")
    assert answer.usage.input_tokens > len(live.engine.seen[-1][0]["prompt_token_ids"])
    with messages.stream(messages=talk, **options) as stream:
        streamed = stream.get_final_message()
    left_out = {"id", "tool_use_id"}
    for one, other in zip(streamed.content, answer.content, strict=True):
        assert one.model_dump(exclude=left_out) == other.model_dump(exclude=left_out)
    assert streamed.usage.output_tokens == answer.usage.output_tokens
    talk += [
        {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
        {"role": "user", "content": "thanks"},
    ]
    assert messages.create(messages=talk, **options).content[0].text == "Done."
    prompt = live.engine.seen[-1][0]["prompt"]
    order = ["{'city': 'Paris'}[tool]", "It rains in Paris.", "{'city': 'Rome'}[tool]", "Rome."]
    places = [prompt.index(text) for text in order]
    assert places == sorted(places)
    counted = messages.count_tokens(model="M", messages=talk, tools=[TOOLSET], mcp_servers=[SERVER])
    assert counted.input_tokens == len(live.engine.seen[-1][0]["prompt_token_ids"])


def test_messages_choose_tools_of_servers(messages, live) -> None:
    mine: Any = {"name": "get_time", "input_schema": {"type": "object"}}
    only: Any = {**TOOLSET, "default_config": {"enabled": False}}
    options: Any = {"model": "M", "max_tokens": 500}

    def ask(question: str, tools: Any = (), **more: Any) -> Any:
        said: Any = [{"role": "user", "content": question}]
        return messages.create(messages=said, tools=list(tools), **options, **more)

    answer = ask("use mine", [TOOLSET, mine])
    assert (answer.content[-1].type, answer.stop_reason) == ("tool_use", "tool_use")
    shouting = {**only, "configs": {"shout": {"enabled": True}}}
    for tools, used in (([shouting], True), ([only], False)):
        answer = ask("use shout", tools)
        assert (answer.content[0].type == "mcp_tool_use") == used
    older: Any = {**SERVER, "tool_configuration": {"allowed_tools": ["fail"]}}
    answer = ask("use fail", mcp_servers=[older])
    assert answer.content[1].is_error
    assert "out of order" in answer.content[1].content[0].text
    again: Any = [{"role": "user", "content": "use weather again"}]
    paused = messages.create(messages=again, tools=[TOOLSET], **options)
    assert paused.stop_reason == "pause_turn"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mcp_servers": [{**SERVER, "name": "private"}]}, "no tool server 'private'"),
        ({"mcp_servers": [{**SERVER, "url": "http://elsewhere"}]}, "is not the address"),
        ({"mcp_servers": [{**SERVER, "authorization_token": "x"}]}, "authorization_token"),
        ({"tools": [{**TOOLSET, "mcp_server_name": "careful"}]}, "need approvals"),
        ({"tools": [{**TOOLSET, "mcp_server_name": "broken"}]}, "tool server broken"),
        ({"tools": [{**TOOLSET, "configs": 5}]}, "configs must be an object"),
        ({"tools": [{**TOOLSET, "default_config": {"defer_loading": True}}]}, "defer_loading"),
    ],
)
def test_wrong_toolsets_name_the_field(live: Live, fields, message) -> None:
    said = [{"role": "user", "content": "hi"}]
    with live.client() as http:
        body = {"model": "M", "max_tokens": 5, "messages": said, **fields}
        answer = http.post("/v1/messages", json=body)
    assert answer.status_code == (502 if "broken" in message else 400)
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == next(iter(fields))


@pytest.mark.parametrize(
    ("entry", "status", "message"),
    [
        (tool("nobody"), 400, "no tool server 'nobody'"),
        (tool("private"), 400, "no tool server 'private'"),
        (tool("broken"), 502, "tool server broken"),
        (tool(server_url="http://x"), 400, "server_url is not supported"),
        (tool(require_approval="maybe"), 400, "require_approval"),
        (tool(allowed_tools=5), 400, "allowed_tools"),
        ({"type": "web_search"}, 400, "only tools of type function and mcp"),
    ],
)
def test_wrong_tools_name_the_field(live: Live, entry, status, message) -> None:
    with live.client() as http:
        answer = http.post(URL, json={"model": "M", "input": "hi", "tools": [entry]})
    assert answer.status_code == status
    assert message in error_of(answer)["message"]
    assert error_of(answer)["param"] == "tools"


@parametrize_sample(
    ("servers", "message"),
    [
        (None, "needs a table"), ({"a": {}}, "either command or url"), ({"a": 5}, "a table"),
        ({"a": {"command": "x"}}, "a list of strings"), ({"a": {"url": "x", "b": 1}}, "'b'"),
        ({"a": {"url": "x", "approval": "no"}}, "approval"),
    ], every=2,
)  # fmt: skip
def test_wrong_files_name_the_entry(tmp_path: Path, servers: Any, message: str) -> None:
    file = tmp_path / "servers.yaml"
    file.write_text(yaml.safe_dump({"servers": servers}))
    with pytest.raises(ConfigError, match=message) as caught:
        read_servers(str(file))
    assert caught.value.field == "tool_server"
    with pytest.raises(ConfigError, match="cannot be read"):
        ToolServers.of(ServerConfig(tool_server=str(tmp_path / "none.yaml")))


@pytest.mark.parametrize("begun", [False, True])
def test_who_waits_for_a_session_that_is_cut_off_is_told_at_once(begun: bool) -> None:
    async def main() -> None:
        server = ToolServer(ServerSettings(label="x", command=("sleep", "600")), 600.0, 1000)
        asking = asyncio.ensure_future(server.tools())
        while server._task is None:
            await asyncio.sleep(0)
        task = server._task
        if begun:
            while not any(map(is_sleep, Path("/proc/self/task").glob("*/children"))):
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(ToolServerError, match="tool server x: the session was cut off"):
            await asyncio.wait_for(asking, 300)
        await asyncio.wait({task})

    asyncio.run(main())


def test_a_call_that_is_late_or_fails_ends_no_other(http_server: str) -> None:
    """Sessions are shared: one request's arguments must not end another's call."""

    async def main() -> None:
        server = ToolServer(ServerSettings(label="x", url=http_server), 60.0, 1000)
        await server.tools()
        other = asyncio.ensure_future(server.call("wait", {"name": "other"}))
        while "other" not in tool_server.waiting:
            await asyncio.sleep(0.002)
        server.timeout = 0.2
        late = await server.call("wait", {"name": "nobody"})
        assert late.error == "no result within 0.2 s"
        server.timeout = 60.0
        assert (await server.call("fail", {})).error is not None
        tool_server.released.add("other")
        assert (await other).output == "other is released"
        tool_server.released.add("nobody")
        await server.close()

    asyncio.run(main())


def is_sleep(children: Path) -> bool:
    names = (Path(f"/proc/{pid}/comm") for pid in children.read_text().split())
    return any(name.read_text() == "sleep\n" for name in names if name.exists())
