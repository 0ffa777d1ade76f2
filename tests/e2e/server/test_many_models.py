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
import httpx
import ollama
import openai
import pytest
from tests.media.files import sound_file
from tests.speech.whisper import write_whisper
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from modulm.config.sources import keywords
from modulm.testing.adapters import write_lora
from modulm.testing.checkpoints import make_tiny
from modulm_server.models.dispatch import Dispatcher
from modulm_server.models.front_engine import FrontEngine
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
    with serving(models_dir=str(folder), load_comment_interval=0.01) as server:
        yield server


def ask(model: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {"model": model, "messages": messages, "max_tokens": 4, "temperature": 0, **fields}


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
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


def test_a_socket_is_for_the_model_of_its_address(many: Many) -> None:
    address = f"{many.url.replace('http', 'ws')}/v1/realtime?model="
    with connect(f"{address}hear") as socket:
        assert "session.created" in str(socket.recv(120))
        assert many.models["hear"].in_flight == 1
    until(lambda: many.models["hear"].in_flight == 0)
    with pytest.raises(InvalidStatus):
        connect(f"{address}nobody")


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


def test_keep_alive_stops_a_model_and_requests_load_it_once(many: Many) -> None:
    """Two requests share the load; the stream gets comments meanwhile."""
    client = ollama.Client(host=many.url)
    assert client.generate("chat", keep_alive=0).done_reason == "unload"
    until(lambda: many.states()["chat"] == "unloaded")
    assert "chat" not in {one.model for one in client.ps().models}
    model = many.models["chat"]
    loads = model.loads

    async def both() -> list[str]:
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


@pytest.mark.exhaustive
def test_replicas_drafts_and_adapters_live_side_by_side(folder: Path, tmp_path: Path) -> None:
    size = json.loads((folder / "chat" / "config.json").read_text())["hidden_size"]
    modules = {"model.layers.0.self_attn.o_proj": (size, size)}
    write_lora(tmp_path / "sql", modules, 4)
    file = tmp_path / "models.yaml"
    drafts = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'
    file.write_text(f"""
models:
  pair: {{model: {folder / "chat"}, data-parallel-size: 2}}
  drafted: {{model: {folder / "chat"}, speculative-config: {drafts}}}
  tuned: {{model: {folder / "chat"}, enable-lora: true, lora-modules: [sql={tmp_path / "sql"}]}}
""")
    with serving(models_config=str(file)) as server:
        answers = {}
        for name in ("pair", "drafted", "tuned", "sql"):
            answer = server.post("/v1/chat/completions", ask(name))
            assert answer.is_success, answer.text
            answers[name] = answer.json()
        contents = {name: one["choices"][0]["message"]["content"] for name, one in answers.items()}
        assert contents["pair"] == contents["drafted"] == contents["tuned"]
        assert answers["sql"]["model"] == "sql"
        engine = server.models["pair"].engine
        assert engine is not None
        assert len(engine.replicas) == len(engine.process_ids) == 2
        metrics = httpx.get(f"{server.url}/metrics").text.splitlines()
        drafters = [line for line in metrics if line.startswith("modulm:spec_decode_info{")]
        assert ['model_name="drafted"' in line for line in drafters] == [True]
        assert server.call(server.pool.unload("pair")).state == "unloaded"
