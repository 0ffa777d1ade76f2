"""Ollama's API with Ollama's own client, against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
import torch
from safetensors.torch import save_file

import modulm
from modulm_route_ollama.parameters import parameter_size
from modulm_server.testing import Live

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[ollama.Client]:
    ollama_client = ollama.Client(host=live.url, timeout=300)
    yield ollama_client
    ollama_client._client.close()


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_conversation_whole_and_streamed(client: ollama.Client) -> None:
    whole = client.chat("M", asked("hello"))
    assert whole.message.content == "Hello there."
    assert whole.message.role == "assistant"
    assert whole.done
    assert whole.done_reason == "stop"
    assert whole.prompt_eval_count > 0
    assert whole.eval_count > 0
    assert whole.total_duration >= whole.eval_duration
    parts = list(client.chat("M:latest", asked("hello"), stream=True))
    assert "".join(part.message.content for part in parts) == "Hello there."
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count


def test_thoughts_are_beside_the_content(client: ollama.Client) -> None:
    whole = client.chat("M", asked("think first"), think=True)
    assert (whole.message.thinking, whole.message.content) == ("Let me see.", "It is 4.")
    parts = list(client.chat("M", asked("think first"), think=True, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == "Let me see."
    assert "".join(part.message.content for part in parts).strip() == "It is 4."


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_complete(client: ollama.Client, stream: bool) -> None:
    answer = client.chat("M", asked("call two tools"), tools=[TOOL], stream=stream)
    parts = list(answer) if stream else [answer]
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [(c.function.name, c.function.arguments) for c in calls] == [
        ("get_weather", {"city": "Paris"}),
        ("get_weather", {"city": "Rome"}),
    ]


def test_results_of_tools_go_back(client: ollama.Client, live: Live) -> None:
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages = [
        *asked("hello"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get_weather", "content": "18 degrees"},
    ]
    assert client.chat("M", messages, tools=[TOOL]).message.content == "Hello there."


def test_a_prompt_whole_streamed_raw_and_continued(client: ollama.Client) -> None:
    whole = client.generate("M", "hello")
    assert whole.response == "Hello there."
    assert whole.context
    raw = client.generate("M", "hello", raw=True)
    assert raw.prompt_eval_count < whole.prompt_eval_count
    parts = list(client.generate("M", "hello", stream=True))
    assert "".join(part.response for part in parts) == "Hello there."
    assert parts[-1].context == whole.context
    again = client.generate("M", "hello", context=whole.context)
    assert again.prompt_eval_count == len(whole.context) + whole.prompt_eval_count


def test_options_reach_the_engine(client: ollama.Client, live: Live) -> None:
    client.chat(
        "M",
        asked("hello"),
        options={"num_predict": 3, "temperature": 0.5, "seed": 7, "top_k": 5, "stop": ["x"]},
    )
    params = live.engine.seen[-1][1]
    assert (params.max_tokens, params.temperature, params.seed) == (3, 0.5, 7)
    assert (params.top_k, params.stop) == (5, ("x",))
    client.generate("M", "hello", format="json")
    assert live.engine.seen[-1][1].structured_outputs.json_object
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    client.chat("M", asked("hello"), format=schema)
    assert live.engine.seen[-1][1].structured_outputs.json == schema


def test_what_is_there(client: ollama.Client) -> None:
    (model,) = client.list().models
    assert model.model == "M"
    details = client.show("M")
    assert "tools" in details.capabilities
    assert "thinking" in details.capabilities
    assert client.ps().models[0].model == "M"
    assert client.pull("M").status == "success"
    assert client.generate("M", "").done_reason == "load"
    assert client.generate("M", "", keep_alive=0).done_reason == "unload"


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("chat", {"model": "nope", "messages": asked("x")}, 404, "modulm serve MODEL"),
        ("pull", {"model": "nope"}, 404, "not served here"),
        ("chat", {"model": "M", "messages": [{"content": "x"}]}, 400, "messages[0].role"),
        ("chat", {"model": "M", "messages": [{"role": "user", "images": ["x"]}]}, 400, "images"),
        ("chat", {"model": "M", "messages": asked("x"), "format": "xml"}, 400, "format"),
        ("generate", {"model": "M", "prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("generate", {"model": "M", "prompt": "x", "options": {"tfs_z": 0.5}}, 400, "tfs_z"),
        ("generate", {"model": "M", "prompt": "x", "options": {"top_p": 7}}, 400, "top_p"),
        ("embed", {"model": "M", "input": "x"}, 400, "--runner pooling"),
    ],
)
def test_what_is_wrong_is_said_as_its_clients_read_it(
    http: httpx.Client, path: str, body: dict[str, object], status: int, message: str
) -> None:
    answer = http.post(f"/api/{path}", json=body)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    assert message in answer.json()["error"]


def test_an_error_inside_a_stream_is_its_last_line(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="failed to finish"):
        list(client.generate("M", "fail late", stream=True))


def test_a_library_of_models_is_refused_in_ollamas_shape(client: ollama.Client) -> None:
    for call in (
        lambda: client.create("other", from_="M"), lambda: client.copy("M", "other"),
        lambda: client.delete("M"), lambda: client.push("M"),
    ):  # fmt: skip
        with pytest.raises(
            ollama.ResponseError, match="clients cannot change the models"
        ) as caught:
            call()
        assert caught.value.status_code == 501


def test_a_larger_context_is_cut_with_a_note(
    client: ollama.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "modulm_server"):
        answer = client.generate("M", "hello", raw=True, options={"num_ctx": 10**9})
    assert answer.done
    assert "options.num_ctx 1000000000 is more than --max-model-len" in caplog.text


@pytest.mark.parametrize("text", ["hello", "think first", "call two tools"])
def test_no_chunk_is_empty(client: ollama.Client, text: str) -> None:
    for part in list(client.chat("M", asked(text), tools=[TOOL], stream=True))[:-1]:
        message = part.message
        assert message.content or message.thinking or message.tool_calls


def test_options_of_samplers_reach_the_engine(client: ollama.Client, live: Live) -> None:
    options = {"typical_p": 0.7, "mirostat": 2, "mirostat_eta": 0.2}
    client.generate("M", "hello", raw=True, options=options)
    assert live.engine.seen[-1][1].extra_args == options
    client.generate("M", "hello", raw=True, options={"typical_p": 1.0, "mirostat": 0})
    assert live.engine.seen[-1][1].extra_args is None


def test_times_of_a_whole_answer_are_those_of_the_engine(client: ollama.Client) -> None:
    """Clients divide the tokens by `eval_duration`: it must not be the time of writing JSON."""
    from modulm_route_ollama.answers import Clock

    clock = Clock(started=1.0)
    clock.token(3.0)
    figures = clock.figures(5, 7)
    assert figures["prompt_eval_duration"] == 2_000_000_000
    assert figures["eval_duration"] == figures["total_duration"] - 2_000_000_000
    whole = client.chat("M", asked("hello"))
    assert 0 < whole.prompt_eval_duration < whole.total_duration


def test_bodies_as_curl_sends_them(live: Live) -> None:
    """Ollama's pages show curl without a content type. A page in a browser names its origin."""
    body = b'{"model": "M", "prompt": "hello", "stream": false, "think": "very"}'
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    local = {**form, "Origin": "http://localhost"}
    site = {**form, "Sec-Fetch-Site": "same-site"}
    with live.client() as http:
        answer = http.post("/api/generate", content=body, headers=form)
        wrong = "think must be one of high, low, max, medium, true, false, not 'very'"
        assert (answer.status_code, answer.json()) == (400, {"error": wrong})
        whole = http.post("/api/generate", content=body.replace(b"very", b"low"), headers=form)
        assert whole.json()["response"] == "Hello there."
        for headers in (local, site):
            assert http.post("/api/generate", content=body, headers=headers).status_code == 415
        assert http.post("/v1/completions", content=body, headers=form).status_code == 415


def test_the_version_is_that_of_the_api(live: Live) -> None:
    """VS Code refuses versions below 0.6.4, and parts of one that are no numbers."""
    told = httpx.get(f"{live.url}/api/version").json()
    assert tuple(map(int, told["version"].split("."))) >= (0, 12, 11)
    assert told["modulm"] == modulm.__version__


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({"a": (16, 32), "b": (16,)}, "528"),
        ({"a": (512, 1024), "b": (512, 1024)}, "1.05M"),
        ({"a": (16, 32), "qweight": (4, 32)}, ""),
        ({}, ""),
    ],
)
def test_sizes_in_parameters(tmp_path: Path, shapes: Any, expected: str) -> None:
    for name, shape in shapes.items():
        dtype = torch.int32 if name == "qweight" else torch.bfloat16
        tensors = {name: torch.zeros(shape, dtype=dtype)}
        save_file(tensors, tmp_path / f"model-{name}.safetensors")
    assert parameter_size(str(tmp_path)) == expected
    (tmp_path / "model-z.safetensors").write_bytes(b"no header")
    parameter_size.cache_clear()
    assert parameter_size(str(tmp_path)) == ""
