"""The front with replicas that are real applications around scripted engines, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from modulm.config import EngineConfig
from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import EngineDead
from modulm.testing.checkpoints import make_tokenizer
from modulm_ray_serve.affinity import Route
from modulm_ray_serve.ingress import Front, Served
from modulm_ray_serve.replica import Call, ModelReplica, _Answer
from modulm_server.app import create_app
from modulm_server.scripted import Reply, ScriptedEngine, scripted_info
from modulm_tokenizers.tokenizer import load_tokenizer


class Replica(ModelReplica):
    """A replica of a scripted engine. dies: what becomes of the next answers: nothing is said, or
    so many messages are."""

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        config = EngineConfig().with_(model="x", served_model_name=(name,), server_dev_mode=True)
        info = scripted_info(tokenizer, models=(name,), config=config)
        self._engine: Any = ScriptedEngine(
            tokenizer, lambda prompt, params: Reply(f"I am {name}."), info
        )
        self._engine.functions["name"] = lambda: [name]
        self._served = create_app(self._engine, config)
        self.dies: list[int] = []
        self.asked: list[tuple[Call, Route | None, str]] = []

    def __del__(self) -> None:  # type: ignore[override]
        """Nothing runs here."""

    async def _answer(self, scope: Any, answer: _Answer) -> None:
        await self._served.app(scope, answer.receive, answer.send)


class Handle:
    """What Ray Serve's handle does, in this process."""

    def __init__(self, replica: Replica, model: str = "") -> None:
        self.replica, self.model = replica, model
        self.ask = self.health = self

    def options(self, stream: bool = True, multiplexed_model_id: str = "") -> Handle:
        return Handle(self.replica, multiplexed_model_id)

    def remote(self, *arguments: Any) -> Any:
        return Streamed(self, *arguments) if arguments else self.replica.health()

    def broadcast(self, method: str, call: Call) -> Broadcast:
        return Broadcast([getattr(self.replica, method)(call) for _ in range(2)])


class Broadcast:
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    async def results_async(self) -> list[Any]:
        return [await call for call in self.calls]


class Streamed:
    def __init__(self, handle: Handle, call: Call, sent_by: Route | None) -> None:
        self.replica = handle.replica
        self.replica.asked.append((call, sent_by, handle.model))
        self.answer = self.replica.ask(call, sent_by)

    def cancel(self) -> None:
        pass

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        dies = self.replica.dies.pop(0) if self.replica.dies else None
        if dies == 0:
            raise EngineDead("it was killed")
        async for messages in self.answer:
            for message in messages:
                yield [message]
                if dies is not None and message["type"].endswith("body"):
                    raise EngineDead("it was killed")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab=512))


@pytest.fixture(scope="module")
def both(tokenizer: Tokenizer) -> list[Replica]:
    return [Replica("ann", tokenizer), Replica("bob", tokenizer)]


@pytest.fixture
def replicas(both: list[Replica]) -> list[Replica]:
    """Two that live, and of which nobody has asked anything."""
    for replica in both:
        replica._engine.dead = None
        replica.dies.clear()
        replica.asked.clear()
    return both


@pytest.fixture
def client(replicas: list[Replica]) -> Iterator[httpx.Client]:
    served = [
        Served(("ann", "anna"), {"poet": "/poet"}, 1, True, 10_000),
        Served(("bob",), {}, 1, False, 10_000),
    ]
    handles: Any = [Handle(replica) for replica in replicas]
    app = Front(served, *handles).__serve_build_asgi_app__()
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as made:
        yield made


def chat(model: str | None, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Who?"}], **more}


@pytest.mark.parametrize(("model", "said"), [("ann", "ann"), ("bob", "bob")])
def test_requests_go_to_their_model(client: httpx.Client, model: str, said: str) -> None:
    answer = client.post("/v1/chat/completions", json=chat(model))
    assert answer.json()["choices"][0]["message"]["content"] == f"I am {said}."
    stream = client.post("/v1/chat/completions", json=chat(model, stream=True))
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.text.endswith("data: [DONE]\n\n")


def test_an_adapter_is_told_to_ray_serve(client: httpx.Client, replicas: list[Replica]) -> None:
    client.post("/v1/completions", json={"model": "poet", "prompt": "x"})
    ((call, sent_by, adapter),) = replicas[0].asked
    assert adapter == "poet"
    assert call.scope["path"] == "/v1/completions"
    assert sent_by is not None
    assert sent_by.tokens > 4096


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("/v1/chat/completions", chat("nobody"), 404, "nobody"),
        ("/v1/chat/completions", chat(None), 400, "ann, anna, bob, poet"),
        ("/v1/chat/completions", chat("ann", temperature="hot"), 400, "temperature"),
        ("/v1/completions", {"model": "ann", "prompt": "x" * 20_000}, 413, "10000 bytes"),
        ("/v1/responses", {"model": "bob", "input": "x", "background": True}, 400, "background"),
        ("/v1/files", {}, 404, "Ray Serve"),
        ("/sleep", {}, 404, "Ray Serve"),
    ],
)
def test_what_is_refused(
    client: httpx.Client, path: str, body: dict[str, Any], status: int, word: str
) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == status
    assert word in answer.json()["error"]["message"]


def test_what_is_no_json_is_refused_as_anywhere(client: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    answer = client.post("/v1/completions", content=b'{"model": ', headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


def test_forms_are_read_for_their_model(client: httpx.Client, replicas: list[Replica]) -> None:
    files = {"file": ("a.wav", b"RIFF", "audio/wav")}
    client.post("/v1/audio/transcriptions", data={"model": "bob"}, files=files)
    assert [len(replica.asked) for replica in replicas] == [0, 1]


def test_models_are_listed(client: httpx.Client) -> None:
    cards = client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["ann", "poet", "bob"]
    assert client.get("/v1/models/poet").json()["parent"] == "ann"
    assert client.get("/v1/models/nobody").status_code == 404
    page = client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [info["display_name"] for info in page["data"]] == ["ann", "poet", "bob"]
    assert page["has_more"] is False


def test_health_is_of_all_models(client: httpx.Client, replicas: list[Replica]) -> None:
    assert client.get("/health").json() == {"status": "ok", "models": {"ann": "ok", "bob": "ok"}}
    replicas[0]._engine.die()
    answer = client.get("/health")
    assert answer.status_code == 200
    assert answer.json() == {"status": "degraded", "models": {"ann": "dead", "bob": "ok"}}
    replicas[1]._engine.die()
    assert client.get("/health").status_code == 503
    assert client.get("/version").json()["version"]


def test_all_replicas_are_called(client: httpx.Client) -> None:
    body = {"model": "bob", "method": "name"}
    assert client.post("/collective_rpc", json=body).json() == {"results": [["bob"], ["bob"]]}
    answer = client.post("/collective_rpc", json=body | {"method": "nothing"})
    assert answer.status_code == 404
    assert "no worker function 'nothing'" in answer.json()["error"]["message"]


def test_what_has_sent_nothing_begins_again(client: httpx.Client, replicas: list[Replica]) -> None:
    replicas[0].dies = [0, 0]
    answer = client.post("/v1/chat/completions", json=chat("ann"))
    assert answer.status_code == 200
    assert len(replicas[0].asked) == 3
    replicas[0].dies = [0, 0, 0]
    answer = client.post("/v1/chat/completions", json=chat("ann"))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "replica_died"


def test_a_stream_that_had_begun_ends_with_an_error(
    client: httpx.Client, replicas: list[Replica]
) -> None:
    replicas[0].dies = [1]
    answer = client.post("/v1/chat/completions", json=chat("ann", stream=True))
    assert len(replicas[0].asked) == 1
    assert answer.status_code == 200
    assert '"code":"replica_died"' in answer.text.rstrip().split("\n\n")[-1]


def test_a_dead_engine_answers_nothing(replicas: list[Replica]) -> None:
    """So that the front may ask another replica."""
    replicas[0]._engine.die()
    with pytest.raises(EngineDead):
        asyncio.run(anext(replicas[0].ask(Call({"type": "http"}), None)))


def test_tenants_have_routes_of_their_own(client: httpx.Client, replicas: list[Replica]) -> None:
    for model, replica, apart in (("ann", replicas[0], True), ("bob", replicas[1], False)):
        for key in ("one", "two"):
            headers = {"authorization": f"Bearer {key}"}
            body = {"model": model, "prompt": "a long beginning " * 20}
            client.post("/v1/completions", json=body, headers=headers)
        first, second = (sent_by for _, sent_by, _ in replica.asked)
        assert first is not None
        assert second is not None
        assert (first.names != second.names) is apart


def test_a_prefix_of_the_application_is_cut(replicas: list[Replica]) -> None:
    handles: Any = [Handle(replicas[0])]
    app = Front([Served(("ann",), {}, 0, False, 10_000)], *handles).__serve_build_asgi_app__()
    with TestClient(app, base_url="http://localhost", root_path="/llm") as made:
        assert made.get("/llm/health").status_code == 200
        body = {"prompt": "x"}  # the only model needs no name
        assert made.post("/llm/v1/completions", json=body).status_code == 200
