"""Adapters over HTTP: they are models of every route; loading and unloading; resolvers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.server.conftest import ServerMaker

from modulm.config import EngineConfig
from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import CheckpointError, ConfigError
from modulm_adapters.places import LoRAModule, inside, read_modules
from modulm_server.app import create_app
from modulm_server.engine.adapters import Adapter
from modulm_server.engine.adapters import _stamp as stamp
from modulm_server.scripted import ScriptedEngine, scripted_info
from modulm_server.testing import Live, error_of

SLOTS = {"parts": {"adapters": {"slots": 2}}}
ASKED = [{"role": "user", "content": "Hello"}]


def write(folder: Path) -> Path:
    """What looks like an adapter: the scripted engine reads nothing."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for name in ("sql", "loads/new", "loads/rotten", "found/poet", "found/team/critic"):
        write(root / name)
    write(root / "secret")
    (root / "found/linked").symlink_to(root / "secret")
    sly = write(root / "found/sly")
    (sly / "adapter_model.safetensors").symlink_to(root / "secret/adapter_config.json")
    (root / "found/round").symlink_to(root / "found/round")
    (root / "found/empty").mkdir()
    return root


@pytest.fixture(scope="module")
def live(make_server: ServerMaker, folder: Path) -> Live:
    module = json.dumps({"name": "told", "path": str(folder / "sql"), "base_model_name": "Base"})
    server = make_server(
        {**SLOTS, "tasks": ("generate", "embed", "classify")},
        enable_lora=True,
        lora_modules=[f"sql={folder / 'sql'}", module],
        allow_runtime_lora_updating=True,
        allowed_lora_path=[str(folder / "loads")],
        lora_resolver_folder=str(folder / "found"),
    )
    server.engine.bad[str(folder / "loads/rotten")] = "rank 99 is more than 16"
    return server


@pytest.fixture
def http(live: Live) -> Iterator[httpx.Client]:
    with live.client() as client:
        yield client


def load(http: httpx.Client, name: str, path: Any, **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **more}
    return http.post("/v1/load_lora_adapter", json=body)


def unload(http: httpx.Client, name: str) -> httpx.Response:
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name})


# As models.


def test_they_are_models_with_parent_and_root(http: httpx.Client, folder: Path) -> None:
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert list(cards)[:3] == ["M", "sql", "told"]
    assert (cards["M"]["parent"], cards["M"]["root"]) == (None, "M")
    assert (cards["sql"]["parent"], cards["sql"]["root"]) == ("M", str(folder / "sql"))
    assert (cards["told"]["parent"], cards["told"]["root"]) == ("Base", str(folder / "sql"))
    assert http.get("/v1/models/told").json() == cards["told"]
    assert cards["sql"]["max_model_len"] == cards["M"]["max_model_len"]


def test_they_are_models_of_anthropics_api(http: httpx.Client) -> None:
    anthropic = {"anthropic-version": "2023-06-01"}
    listed = http.get("/v1/models", headers=anthropic).json()["data"]
    assert [model["id"] for model in listed][:3] == ["M", "sql", "told"]
    one = http.get("/v1/models/sql", headers=anthropic).json()
    assert (one["type"], one["id"]) == ("model", "sql")


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASKED},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": ASKED, "max_tokens": 4},
    "/v1/embeddings": {"input": "Hello"},
    "/v2/embed": {"texts": ["Hello"], "input_type": "search_query"},
    "/pooling": {"input": "Hello", "task": "embed"},
    "/classify": {"input": "Hello"},
    "/v1/score": {"text_1": "Hello", "text_2": "there"},
    "/v1/rerank": {"query": "Hello", "documents": ["there"]},
}
COUNTED: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/messages/count_tokens": {"messages": ASKED},
    "/v1/completions/render": {"prompt": "Hello"},
    "/v1/chat/completions/render": {"messages": ASKED},
}


@pytest.mark.parametrize("path", BODIES)
def test_every_route_has_them(live: Live, http: httpx.Client, path: str) -> None:
    for model, used in (("sql", "sql"), ("M", None)):
        answer = http.post(path, json={**BODIES[path], "model": model})
        assert answer.status_code == 200, answer.text
        assert set(live.engine.used[-1:]) == {used}
        assert answer.json().get("model", model) == model


def test_streams_and_beams_have_them(live: Live, http: httpx.Client) -> None:
    for more in ({"stream": True}, {"use_beam_search": True, "n": 2}):
        body = {**BODIES["/v1/chat/completions"], **more, "model": "told", "max_tokens": 3}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        assert '"model":"told"' in answer.text
        assert live.engine.used[-1] == "told"


@pytest.mark.parametrize("path", [*BODIES, *COUNTED])
def test_an_unknown_name_is_404_everywhere(http: httpx.Client, path: str) -> None:
    body = {**BODIES, **COUNTED}[path]
    answer = http.post(path, json={**body, "model": "nobody"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    known = http.post(path, json={**body, "model": "sql"})
    assert known.status_code == 200, known.text


def test_batches_name_them(live: Live) -> None:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        row = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
               "body": {"model": "sql", "messages": ASKED}}  # fmt: skip
        data = json.dumps(row).encode()
        file = client.files.create(file=("rows.jsonl", data), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        for _ in range(30_000):
            batch = client.batches.retrieve(batch.id)
            if batch.status == "completed":
                break
            threading.Event().wait(0.01)
        answer = json.loads(client.files.content(str(batch.output_file_id)).text)
    assert answer["response"]["body"]["model"] == "sql"
    assert live.engine.used[-1] == "sql"


def test_what_another_server_has_just_loaded_is_found(live: Live, http: httpx.Client) -> None:
    """What the engine's process tells may come a moment after the client's next request."""
    late = Adapter("late", "anywhere")

    async def refresh() -> None:
        live.engine.load_adapter(late, replace=True)

    live.engine.refresh_adapters = refresh
    try:
        answer = http.post("/v1/completions", json={"model": "late", "prompt": "x"})
    finally:
        del live.engine.refresh_adapters
        live.engine.unload_adapter("late")
    assert answer.status_code == 200
    assert live.engine.used[-1] == "late"


# Loading and unloading.


def test_loaded_used_and_unloaded(live: Live, http: httpx.Client, folder: Path) -> None:
    answer = load(http, "new", folder / "loads/new", base_model_name="Base")
    assert (answer.status_code, answer.headers["content-type"]) == (
        200,
        "text/plain; charset=utf-8",
    )
    assert answer.text.startswith("Success")
    assert live.engine.adapters["new"] == Adapter("new", str(folder / "loads/new"), "Base")
    assert http.post("/v1/completions", json={"model": "new", "prompt": "x"}).status_code == 200
    again = load(http, "new", folder / "loads/new")
    assert (again.status_code, error_of(again)["param"]) == (400, "lora_name")
    assert load(http, "new", folder / "loads/new", load_inplace=True).status_code == 200
    assert unload(http, "new").text.startswith("Success")
    assert http.post("/v1/completions", json={"model": "new", "prompt": "x"}).status_code == 404
    response = unload(http, "new")
    assert (response.status_code, error_of(response)["param"]) == (404, "lora_name")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "lora_name"),
        ({"lora_name": "", "lora_path": "x"}, "lora_name"),
        ({"lora_name": "a" * 300, "lora_path": "x"}, "lora_name"),
        ({"lora_name": "a\nb", "lora_path": "x"}, "lora_name"),
        ({"lora_name": "a/../b", "lora_path": "x"}, "lora_name"),
        ({"lora_name": "..", "lora_path": "x"}, "lora_name"),
        ({"lora_name": " a", "lora_path": "x"}, "lora_name"),
        ({"lora_name": "a ", "lora_path": "x"}, "lora_name"),
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_name": 5, "lora_path": "x"}, "lora_name"),
        ({"lora_name": "a", "lora_path": "a\0b"}, "lora_path"),
    ],
)
def test_bodies_that_say_too_little(http: httpx.Client, body: Any, param: str) -> None:
    answer = http.post("/v1/load_lora_adapter", json=body)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)
    if param == "lora_name":
        assert http.post("/v1/unload_lora_adapter", json=body).status_code == 400


@pytest.mark.parametrize(
    "path", ["secret", "loads/../secret", "loads", "loads/nowhere", "found/poet", "loads/link"]
)
def test_paths_elsewhere_are_refused(http: httpx.Client, folder: Path, path: str) -> None:
    """They lead out of the allowed folder, by name, by `..`, by a link, or nowhere."""
    link = folder / "loads/link"
    if not link.is_symlink():
        link.symlink_to(folder / "secret")
    answer = load(http, "spy", folder / path)
    if path == "loads":
        assert answer.status_code == 400
        assert "leads outside" in error_of(answer)["message"]
    error = error_of(answer)
    assert (answer.status_code, error["param"]) == (400, "lora_path")
    assert "'spy'" in error["message"]
    assert "spy" not in http.get("/v1/models").text


def test_a_bad_one_is_a_400_that_names_it(http: httpx.Client, folder: Path) -> None:
    error = error_of(load(http, "rotten", folder / "loads/rotten"))
    assert error["message"] == "adapter 'rotten' cannot be loaded: rank 99 is more than 16"
    assert http.post("/v1/completions", json={"model": "sql", "prompt": "x"}).status_code == 200


def test_without_the_flags_nobody_loads(make_server: ServerMaker, folder: Path) -> None:
    served = make_server(SLOTS, enable_lora=True)
    with served.client() as http:
        assert load(http, "a", folder / "loads/new").status_code == 404
        assert unload(http, "a").status_code == 404
    nowhere = make_server(SLOTS, enable_lora=True, allow_runtime_lora_updating=True)
    with nowhere.client() as http:
        answer = load(http, "a", folder / "loads/new")
        assert answer.status_code == 400
        assert "--allowed-lora-path" in error_of(answer)["message"]


def test_loading_asks_for_a_key(make_server: ServerMaker, folder: Path) -> None:
    created = make_server(
        SLOTS, enable_lora=True, allow_runtime_lora_updating=True, api_key=["right"],
        allowed_lora_path=[str(folder / "loads")],
    )  # fmt: skip
    with created.client() as http:
        assert load(http, "a", folder / "loads/new").status_code == 401
        assert unload(http, "a").status_code == 401
        http.headers["Authorization"] = "Bearer right"
        assert load(http, "a", folder / "loads/new").status_code == 200


# From the start.


@pytest.fixture
def start(tokenizer: Tokenizer) -> Callable[..., ScriptedEngine]:
    def started(slots: int = 2, bad: dict[str, str] | None = None, **flags: Any) -> ScriptedEngine:
        config = EngineConfig.from_keywords(model="M", **flags)
        engine = ScriptedEngine(
            tokenizer,
            info=scripted_info(tokenizer, config=config, parts={"adapters": {"slots": slots}}),
        )
        engine.bad.update(bad or {})
        create_app(engine, config)
        return engine

    return started


def test_a_bad_one_ends_the_start(start: Callable[..., ScriptedEngine], folder: Path) -> None:
    path = str(folder / "sql")
    with pytest.raises(ConfigError, match=r"a: adapter 'a' cannot be loaded: no weights"):
        start(lora_modules=[f"a={path}"], enable_lora=True, bad={path: "no weights"})
    for flags in ({"lora_modules": [f"a={path}"]}, {"allow_runtime_lora_updating": True}):
        with pytest.raises(ConfigError, match="needs --enable-lora") as caught:
            start(slots=0, **flags)
        assert caught.value.field == next(iter(flags))


def test_what_another_server_of_the_engine_has_loaded_is_there(
    start: Callable[..., ScriptedEngine], folder: Path
) -> None:
    engine = start(lora_modules=[f"a={folder / 'sql'}"], enable_lora=True)
    create_app(engine, engine.info.config)
    assert list(engine.adapters) == ["a"]


@pytest.mark.parametrize(
    "entry", ["a", "=x", "a=", '{"name": "a"}', '{"name": "a", "path": 5}', "{nonsense",
              '{"name": "a", "path": "x", "paht": "y"}', '["a"]', "../a=x", "a/../b=x", " a=x",
              "a\0b=x", f"{'a' * 257}=x"]
)  # fmt: skip
def test_entries_that_name_nothing(entry: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_modules([entry])
    assert caught.value.field == "lora_modules"


def test_entries_in_both_forms() -> None:
    assert read_modules(["a=x=y", ' {"name": "b", "path": "z"}']) == (
        LoRAModule("a", "x=y"), LoRAModule("b", "z"),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="twice"):
        read_modules(["a=x", "a=y"])


# Resolvers.


def test_a_name_is_found_on_first_use_and_stays(live: Live, folder: Path) -> None:
    calls: list[str] = []
    family = next(candidate for candidate in live.served.families if candidate.name == "adapters")
    resolver: Any = family._resolvers[0]  # type: ignore[attr-defined]
    resolve = resolver.resolve
    resolver.resolve = lambda name: calls.append(name) or resolve(name)
    try:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
            for name in ("poet", "poet", "team/critic"):
                answer = client.completions.create(model=name, prompt="Hello")
                assert answer.model == name
                assert live.engine.used[-1] == name
            root = client.models.retrieve("team/critic").model_dump()["root"]
    finally:
        resolver.resolve = resolve
    assert calls == ["poet", "team/critic"]
    assert live.engine.adapters["poet"].path == str(folder / "found/poet")
    assert root == "team/critic"


@pytest.mark.parametrize(
    "name", ["../secret", "/etc", "team/../../secret", "found", "empty", ".", "", "a" * 5000,
             "poet/", "po\0et", "poet/adapter_config.json", "{poet}", "round"],
)  # fmt: skip
def test_names_that_are_no_folders_below_are_404(http: httpx.Client, name: str) -> None:
    answer = http.post("/v1/completions", json={"model": name, "prompt": "x"})
    assert answer.status_code == 404


@pytest.mark.parametrize("name", ["linked", "sly"])
def test_links_that_lead_out_are_refused(live: Live, http: httpx.Client, name: str) -> None:
    answer = http.post("/v1/completions", json={"model": name, "prompt": "x"})
    error = error_of(answer)
    assert (answer.status_code, error["param"]) == (400, "model")
    assert f"adapter '{name}' cannot be loaded" in error["message"]
    assert name not in live.engine.adapters


def test_the_hub_is_asked_only_for_what_the_operator_names(
    start: Callable[..., ScriptedEngine], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    from modulm_adapter_resolver_hub import resolver

    downloads: list[tuple[str, str | None]] = []

    def download(name: str, config: EngineConfig) -> Path:
        downloads.append((name, config.model.revision))
        return folder / "sql"

    monkeypatch.setattr(resolver, "download", download)
    config = EngineConfig.from_keywords(
        model="M", revision="v1", lora_resolver_repos=["us/one", "them/*"]
    )
    hub = resolver.HubResolver.of(config)
    assert hub is not None
    for name in ("us/one", "them/any"):
        assert hub.resolve(name) == folder / "sql"
    for name in ("us/two", "one", "../us/one", "us/one/more", "them/", "us"):
        assert hub.resolve(name) is None
    assert downloads == [("us/one", None), ("them/any", None)]
    assert resolver.HubResolver.of(EngineConfig()) is None
    for wrong in ("*", "*/*", "us", "us/o*"):
        with pytest.raises(ConfigError, match="owner"):
            EngineConfig.from_keywords(lora_resolver_repos=[wrong])
    with pytest.raises(ConfigError, match="is not a folder"):
        start(enable_lora=True, lora_resolver_folder=str(folder / "nowhere"))


def test_one_of_several_adapters_in_a_folder_has_a_path_of_its_own(tmp_path: Path) -> None:
    """And a stamp: another one of the same files is another adapter."""
    folder = tmp_path / "adapters"
    folder.mkdir()
    with pytest.raises(CheckpointError, match="not a folder"):
        inside(folder / "query", [tmp_path])
    (folder / "adapter_config.json").write_text("{}")
    assert inside(folder / "query", [tmp_path]) == (folder / "query").resolve()
    with pytest.raises(CheckpointError, match="outside"):
        inside(folder / "query", [folder / "query"])
    assert len({stamp(folder), stamp(folder / "query"), stamp(folder / "passage")}) == 3


def test_a_keys_adapters_are_its_own(make_server: ServerMaker, folder: Path) -> None:
    server = make_server(
        {**SLOTS}, enable_lora=True, allow_runtime_lora_updating=True, api_key=["one", "two"],
        allowed_lora_path=[str(folder / "loads")], lora_modules=[f"sql={folder / 'sql'}"],
        max_adapters_per_key=1,
    )  # fmt: skip
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    with server.client(headers=one) as mine, server.client(headers=two) as other:
        path = folder / "loads/new"
        assert load(mine, "own", path).status_code == 200
        names = [[card["id"] for card in c.get("/v1/models").json()["data"]] for c in (mine, other)]
        assert names == [["M", "sql", "own"], ["M", "sql"]]
        body = {"model": "own", "prompt": "Hello", "max_tokens": 1}
        answers = [c.post("/v1/completions", json=body).status_code for c in (mine, other)]
        assert answers == [200, 404]
        assert load(other, "own", path, load_inplace=True).status_code == 400
        assert unload(other, "own").status_code == 404
        assert [unload(c, "sql").status_code for c in (mine, other)] == [400, 400]
        assert load(mine, "further", path).status_code == 429
        assert load(other, "further", path).status_code == 200
        assert load(mine, "own", path, load_inplace=True).status_code == 200
        assert unload(mine, "own").status_code == 200
        assert load(mine, "third", path).status_code == 200


@pytest.mark.parametrize("name", ["a/../b", "..", " a", "a ", "a\nb", "a\x7f", "a\x00"])
def test_names_that_could_mislead_are_refused(http: httpx.Client, folder: Path, name: str) -> None:
    answer = load(http, name, folder / "loads/new")
    assert (answer.status_code, error_of(answer)["param"]) == (400, "lora_name")
