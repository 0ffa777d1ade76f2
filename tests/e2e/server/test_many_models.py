"""One server of three models: a chat model, an embedding model and a tiny Whisper."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import click
import httpx
import ollama
import openai
import pytest
from attrs import evolve
from click.testing import CliRunner
from tests.media.files import sound_file
from tests.speech.whisper import write_whisper

from modulm.config.sources import keywords
from modulm.errors import ConfigError
from modulm.testing.checkpoints import make_tiny
from modulm_command_models import commands
from modulm_server.models.dispatch import Dispatcher
from modulm_server.models.flags import parse_duration, parse_size
from modulm_server.models.front_engine import FrontEngine
from modulm_server.models.hosted_model import HostedModel
from modulm_server.models.pool import ModelPool
from modulm_server.models.serve import make_pool
from modulm_server.testing import Live, error_of, serve_in_thread
from modulm_towers.testing import sounds

NAMES = ["chat", "embed", "hear"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_tiny(folder / "chat")
    make_tiny(folder / "embed", "BertModel")
    (folder / "hear").mkdir()
    write_whisper(folder / "hear", 4)
    return folder


class Many:
    """A running server and its models."""

    def __init__(self, live: Live, pool: ModelPool) -> None:
        self.live, self.pool, self.url = live, pool, live.url
        self.models = {model.name: model for model in pool.models}

    def call(self, work: Any) -> Any:
        """Run a coroutine on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.live.loop).result(300)

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=headers, timeout=300)

    def states(self) -> dict[str, str]:
        cards = httpx.get(f"{self.url}/v1/models").json()["data"]
        return {card["id"]: card["status"]["value"] for card in cards}


@contextmanager
def serving(**flags: Any) -> Iterator[Many]:
    config = keywords(
        device="cpu", dtype="float32", kv_cache_memory_bytes=1 << 20, host="127.0.0.1", **flags
    ).config
    pool = make_pool(config, ())
    engine = FrontEngine(pool, config, pool.names)
    try:
        with serve_in_thread(engine, config, host=Dispatcher(pool)) as live:
            yield Many(live, pool)
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def many(folder: Path) -> Iterator[Many]:
    with serving(models_dir=str(folder)) as server:
        yield server


def ask(model: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {"model": model, "messages": messages, "max_tokens": 4, "temperature": 0, **fields}


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_every_api_routes_by_model(many: Many) -> None:
    assert set(many.states().values()) == {"unloaded"}
    text = "hi"
    with openai.OpenAI(base_url=f"{many.url}/v1", api_key="k", max_retries=0) as sdk:
        chat = sdk.chat.completions.create(**ask("chat"))
        assert chat.model == "chat"
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 4
        vectors = sdk.embeddings.create(model="embed", input=[text, "two"])
        assert len(vectors.data) == 2
        file = ("a.wav", sound_file(sounds((1.0,))[0]))
        heard = sdk.audio.transcriptions.create(model="hear", file=file, language="en")
        assert isinstance(heard.text, str)
        response = sdk.responses.create(model="chat", input=text, max_output_tokens=16)
        assert sdk.responses.retrieve(response.id).output_text == response.output_text
        following = sdk.responses.create(
            model="chat", input=text, previous_response_id=response.id, max_output_tokens=16
        )
        assert following.previous_response_id == response.id
    with anthropic.Anthropic(base_url=many.url, api_key="k", max_retries=0) as claude:
        message = claude.messages.create(
            model="chat", max_tokens=4, messages=[{"role": "user", "content": text}]
        )
        assert message.usage.output_tokens == 4
    client = ollama.Client(host=many.url)
    options = {"num_predict": 4, "temperature": 0}
    assert client.chat("chat:latest", [{"role": "user", "content": text}], options=options).done
    assert client.embed("embed", [text])["embeddings"] == [
        pytest.approx(list(vectors.data[0].embedding))
    ]
    assert {one.model for one in client.list().models} == set(NAMES)
    assert {one.model for one in client.ps().models} == set(NAMES)
    assert client.show("chat").capabilities
    assert client.pull("hear").status == "success"
    client._client.close()
    assert many.post("/completion", {"prompt": text, "n_predict": 2, "model": "chat"}).is_success
    assert many.post("/embedding", {"content": text, "model": "embed"}).is_success
    assert many.post("/tokenize", {"prompt": text, "model": "embed"}).json()["count"] > 0
    assert many.post("/invocations", ask("chat")).json()["model"] == "chat"
    assert httpx.get(f"{many.url}/props?model=chat").json()["model_alias"] == "chat"
    samples = [line for line in httpx.get(f"{many.url}/metrics").text.splitlines() if line]
    assert {f'modulm:model_loads{{model_name="{name}"}} 1.0' for name in NAMES} <= set(samples)
    running = [line for line in samples if line.startswith("modulm:num_requests_running{")]
    assert all(any(f'model_name="{name}"' in line for line in running) for name in NAMES)


def test_a_request_without_a_name_is_for_the_first_model(many: Many) -> None:
    assert many.post("/completion", {"prompt": "hi", "n_predict": 1}).json()["model"] == "chat"


def test_a_batch_of_lines_for_several_models(many: Many) -> None:
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": ask(name)}
        for name in ("chat", "nobody")
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    with openai.OpenAI(base_url=f"{many.url}/v1", api_key="k", max_retries=0) as sdk:
        file = sdk.files.create(file=("a.jsonl", data), purpose="batch")
        batch = sdk.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        until(lambda: sdk.batches.retrieve(batch.id).status == "completed")
        counts = sdk.batches.retrieve(batch.id).request_counts
        assert counts is not None
        assert (counts.completed, counts.failed) == (1, 1)


def test_unknown_models_get_the_apis_own_404_with_what_there_is(many: Many) -> None:
    answers = {
        path: many.post(path, {**ask("nobody"), "prompt": "hi", "input": "hi"})
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/completion")
    }
    assert {answer.status_code for answer in answers.values()} == {404}
    assert all("chat, embed, hear" in answer.text for answer in answers.values())
    error = error_of(answers["/v1/chat/completions"])
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert answers["/v1/messages"].json()["type"] == "error"
    assert isinstance(answers["/api/chat"].json()["error"], str)
    assert answers["/completion"].json()["error"]["code"] == 404
    form = {"model": "nobody"}
    files = {"file": ("a.wav", b"x")}
    path = f"{many.url}/v1/audio/transcriptions"
    assert httpx.post(path, data=form, files=files).status_code == 404
    assert httpx.get(f"{many.url}/v1/models/nobody").status_code == 404


def test_bad_requests_load_nothing(many: Many) -> None:
    for body in (b"{", b"[]", b"\xff", b'{"model": NaN}'):
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{many.url}/v1/chat/completions", content=body, headers=headers)
        assert answer.status_code == 400
    wrong = many.post("/v1/chat/completions", ask("hear"))
    assert wrong.status_code in (400, 404)
    assert many.post("/api/chat", {**ask("chat"), "keep_alive": "soon"}).status_code == 400


def test_keep_alive_stops_a_model_and_the_next_request_loads_it(many: Many) -> None:
    client = ollama.Client(host=many.url)
    assert client.generate("chat", keep_alive=0).done_reason == "unload"
    until(lambda: many.states()["chat"] == "unloaded")
    assert "chat" not in {one.model for one in client.ps().models}
    assert client.generate("chat", keep_alive="10m").done_reason == "load"
    (shown,) = (one for one in client.ps().models if one.model == "chat")
    assert shown.expires_at is not None
    assert 500 < shown.expires_at.timestamp() - time.time() <= 600
    client._client.close()


def test_a_dead_engine_is_loaded_again_and_others_go_on(many: Many) -> None:
    model = many.models["chat"]
    assert model.engine is not None
    (process,) = model.engine.process_ids
    os.kill(process, signal.SIGKILL)
    until(lambda: many.states()["chat"] == "failed")
    loads = many.models["embed"].loads
    assert many.post("/v1/embeddings", {"model": "embed", "input": "hi"}).is_success
    assert httpx.get(f"{many.url}/health").is_success
    assert many.post("/v1/chat/completions", ask("chat")).is_success
    assert many.models["embed"].loads == loads


def test_two_requests_load_once_and_a_stream_gets_comments(many: Many) -> None:
    model = many.models["chat"]
    many.call(many.pool.unload("chat"))
    loads = model.loads

    async def both() -> list[str]:
        many.pool._flags = keywords(load_comment_interval=0.01).config.group(type(many.pool._flags))
        async with httpx.AsyncClient(base_url=many.url, timeout=300) as http:
            bodies = [ask("chat", stream=True), ask("chat")]
            answers = [http.post("/v1/chat/completions", json=body) for body in bodies]
            return [answer.text for answer in await asyncio.gather(*answers)]

    stream, whole = asyncio.run(both())
    assert model.loads == loads + 1
    assert stream.startswith(": loading the model\n\n")
    frames = [part[6:] for part in stream.split("\n\n") if part.startswith("data: ")]
    assert frames[-1] == "[DONE]"
    content = "".join(
        choice["delta"].get("content", "")
        for frame in frames[:-1]
        for choice in json.loads(frame)["choices"]
    )
    assert content == json.loads(whole)["choices"][0]["message"]["content"]


@pytest.fixture
def sizes(many: Many, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """What each model takes, instead of what is measured. Nothing is loaded at first."""
    sizes = dict.fromkeys(NAMES, 100)
    for model in many.models.values():
        many.call(many.pool.unload(model.name))
        model.needed = 0

    async def measure(model: HostedModel) -> None:
        model.memory = sizes[model.name]

    monkeypatch.setattr(HostedModel, "measure", measure)
    monkeypatch.setattr("modulm_server.models.hosted_model.estimate", lambda path: 100)
    yield sizes
    many.pool.budget = None


def test_the_longest_unused_model_makes_room(many: Many, sizes: dict[str, int]) -> None:
    many.pool.budget = 250
    for name in ("chat", "embed"):
        many.call(many.pool.load(name))
    assert many.post("/api/generate", {"model": "chat"}).is_success
    many.call(many.pool.load("hear"))
    assert many.states() == {"chat": "loaded", "embed": "unloaded", "hear": "loaded"}
    sizes["embed"] = 200  # more than estimated: the others make room afterwards
    many.call(many.pool.load("embed"))
    assert many.states() == {"chat": "unloaded", "embed": "loaded", "hear": "unloaded"}
    sizes["hear"] = 300
    answer = many.post("/models/load", {"model": "hear"})
    assert (answer.status_code, error_of(answer)["code"]) == (503, "model_load_failed")
    assert "--memory-budget" in answer.text
    model = many.models["chat"]
    many.call(many.pool.load("chat"))
    model.settings = evolve(model.settings, pinned=True)
    answer = many.post("/v1/embeddings", {"model": "embed", "input": "hi"})
    assert answer.status_code == 503
    assert "pinned" in answer.text
    assert many.states()["chat"] == "loaded"
    model.settings = evolve(model.settings, pinned=False)


def test_a_running_stream_ends_before_its_model_makes_room(
    many: Many, sizes: dict[str, int]
) -> None:
    many.pool.budget = 100
    body = ask("chat", stream=True, max_tokens=200, ignore_eos=True)
    path = f"{many.url}/v1/chat/completions"
    with httpx.stream("POST", path, json=body, timeout=300) as stream:
        lines = stream.iter_lines()
        while not next(lines).startswith("data: "):
            pass  # a comment, while the model is loaded
        loading = asyncio.run_coroutine_threadsafe(many.pool.load("embed"), many.live.loop)
        rest = list(lines)
    assert rest[-2] == "data: [DONE]"
    assert '"finish_reason":"length"' in "".join(rest)
    assert loading.result(300).state == "loaded"
    assert many.states()["chat"] == "unloaded"


def test_a_full_queue_refuses(many: Many, sizes: dict[str, int]) -> None:
    model = many.models["chat"]
    model.waiting = 256
    try:
        answer = many.post("/v1/chat/completions", ask("chat"))
    finally:
        model.waiting = 0
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"


def test_commands_list_load_and_stop_models(many: Many) -> None:
    def run(command: click.Command, *arguments: str) -> str:
        result = CliRunner().invoke(command, [*arguments, "--url", many.url])
        assert result.exit_code == 0, result.output
        return result.output

    run(commands.stop, "embed")
    assert run(commands.load, "embed").startswith("embed: loaded, ")
    assert many.models["embed"].memory > 1 << 20
    rows = [line.split() for line in run(commands.ps).splitlines()[:4]]
    assert [row[0] for row in rows] == ["NAME", *NAMES]
    assert rows[2][1] == "loaded"
    assert run(commands.stop, "embed") == "embed: unloaded, 0 MiB\n"
    assert run(commands.reload) == "nothing has changed\n"
    failed = CliRunner().invoke(commands.load, ["nobody", "--url", many.url])
    assert failed.exit_code == 1
    assert "only chat, embed, hear" in failed.output


@pytest.fixture
def broken(folder: Path, tmp_path: Path) -> Iterator[Many]:
    (tmp_path / "weights").mkdir()
    for file in (folder / "chat").iterdir():
        if file.name != "model.safetensors":
            (tmp_path / "weights" / file.name).symlink_to(file)
    config = tmp_path / "models.yaml"
    config.write_text(
        f"models:\n  broken: {{model: {tmp_path / 'weights'}}}\n"
        f"  works: {{model: {folder / 'chat'}, aliases: [gpt-4o], api_keys: [a]}}\n"
    )
    with serving(
        models_config=str(config), load_comment_interval=0.01, api_key=["a", "b"]
    ) as server:
        yield server


def test_a_failed_load_says_why_and_keys_choose_models(broken: Many) -> None:
    key_a, key_b = ({"Authorization": f"Bearer {key}"} for key in "ab")
    assert broken.post("/v1/chat/completions", ask("works")).status_code == 401
    answer = broken.post("/v1/chat/completions", ask("broken"), **key_a)
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert error["code"] == "model_load_failed"
    assert "cannot be loaded" in error["message"]
    stream = broken.post("/v1/messages", ask("broken", stream=True), **key_a)
    assert stream.status_code == 200
    assert "event: error\ndata: " in stream.text
    assert broken.post("/v1/chat/completions", ask("works"), **key_b).status_code == 404
    names = httpx.get(f"{broken.url}/v1/models", headers=key_b).json()["data"]
    assert [name["id"] for name in names] == ["broken"]
    assert names[0]["status"]["value"] == "failed"
    assert names[0]["status"]["error"]
    answer = broken.post("/v1/chat/completions", ask("gpt-4o"), **key_a)
    assert answer.json()["model"] == "gpt-4o"


def test_reloading_drops_no_stream_and_a_sleeping_model_wakes_up(
    broken: Many, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {"Authorization": "Bearer a"}
    file = tmp_path / "models.yaml"
    table = f"{{model: {folder / 'chat'}, max-model-len: 64, sleep: 1}}"
    body = ask("works", stream=True, max_tokens=200, ignore_eos=True)
    path = f"{broken.url}/v1/chat/completions"
    with httpx.stream("POST", path, json=body, headers=headers, timeout=300) as stream:
        lines = stream.iter_lines()
        while not next(lines).startswith("data: "):
            pass
        file.write_text(f"models:\n  works: {table}\n  new: {{model: {folder / 'chat'}}}\n")
        answer = broken.post("/models/reload", {}, **headers)
        assert answer.json() == {"added": ["new"], "changed": ["works"], "removed": ["broken"]}
        assert '"finish_reason":"length"' in "".join(lines)
    assert broken.post("/v1/chat/completions", ask("works"), **headers).is_success
    cards = httpx.get(f"{broken.url}/v1/models", headers=headers).json()["data"]
    assert {card["id"]: card["max_model_len"] for card in cards} == {"works": 64, "new": None}
    file.write_text("models: {}\n")
    assert broken.post("/models/reload", {}, **headers).status_code == 400
    (model,) = (one for one in broken.pool.models if one.name == "works")

    async def measure(model: HostedModel) -> None:
        model.memory = 10 if model.state == "sleeping" else 100

    monkeypatch.setattr(HostedModel, "measure", measure)
    model.memory = 100
    broken.call(broken.pool._leave(model, evicted=True))
    assert (model.state, model.loads) == ("sleeping", 2)
    assert broken.post("/v1/chat/completions", ask("works"), **headers).is_success
    assert (model.state, model.loads) == ("loaded", 2)


def test_sizes_and_durations() -> None:
    sizes = {"8GiB": 8 << 30, "500MB": 500_000_000, "1.5k": 1500, "77": 77, 5: 5, None: None}
    assert {text: parse_size(text) for text in sizes} == sizes
    times = {
        "90": 90,
        "10m": 600,
        "1h30m": 5400,
        "-1": None,
        -1: None,
        "-5m": None,
        0: 0,
        "1.5s": 1.5,
    }
    assert {text: parse_duration(text) for text in times} == times
    for wrong in ("", "soon", "1x", True, [], "nan"):
        with pytest.raises(ValueError, match="duration"):
            parse_duration(wrong)
    for wrong in ("0", "-1", "8 apples", True):
        with pytest.raises(ValueError, match="size|byte"):
            parse_size(wrong)


def test_settings_that_are_wrong_name_the_model(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    base = keywords(models_config=str(file)).config
    for table, message in (
        ("a: {port: 1}", "whole server"),
        ("a: {sleep: 3}", "0, 1 or 2"),
        ("a: {keep_alive: soon}", "duration"),
        ("a: {api_keys: [x]}", "api-key"),
        ("a: {max_model_len: x}", "max_model_len"),
        ("a: {no_such_flag: 1}", "no_such_flag"),
        ("a: {aliases: [b]}\n  b: {}", "a name of 'a' too"),
    ):
        file.write_text(f"models:\n  {table}\n")
        with pytest.raises(ConfigError, match=message) as raised:
            make_pool(base, ())
        assert raised.value.field == "models_config"
