"""Several keys: nothing of one is visible with another (reference cases A163, A171)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from modulm import AsyncLLM
from modulm.testing.checkpoints import make_tiny
from modulm_route_responses.store import Store, Stored
from modulm_server.testing import Live, serve_in_thread

ServerMaker = Callable[..., Live]

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
#: A body for every route that generates.
GENERATING: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
}
#: How much of a prompt the caches of a tiny model keep: whole blocks of it.
LONG = "a word and another one " * 20


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def shared(make_server: ServerMaker) -> Live:
    return make_server(api_key=("ann", "bob"), enable_log_requests=True)


def salts(live: Live, path: str, keys: tuple[str, ...], **fields: Any) -> list[str | None]:
    live.engine.salts.clear()
    for key in keys:
        with live.client(headers=headers(key)) as client:
            assert client.post(path, json={**GENERATING[path], **fields}).status_code == 200
    return list(live.engine.salts)


@pytest.mark.parametrize("path", GENERATING)
def test_a171_every_route_keeps_prefixes_of_keys_apart(shared: Live, path: str) -> None:
    ann, bob, again = salts(shared, path, ("ann", "bob", "ann"))
    assert ann == again != bob
    assert None not in (ann, bob)
    assert "ann" not in str(ann)


def test_streams_beams_and_a_salt_of_ones_own(shared: Live) -> None:
    path = "/v1/completions"
    ann, bob = salts(shared, path, ("ann", "bob"), stream=True)
    assert ann != bob
    ann, bob = salts(shared, path, ("ann", "bob"), use_beam_search=True, n=2)
    assert ann != bob
    plain, *_ = salts(shared, path, ("ann",))
    salted, other = salts(shared, path, ("ann", "bob"), cache_salt="x")
    assert len({plain, salted, other}) == 3
    # nobody names what belongs to another one
    (forged,) = salts(shared, path, ("bob",), cache_salt=str(plain))
    assert forged not in (plain, salted)


def test_background_and_batches_are_in_the_name_of_their_key(shared: Live) -> None:
    (ann,) = salts(shared, CHAT, ("ann",))
    shared.engine.salts.clear()
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": GENERATING[CHAT]}
    with shared.client(headers=headers("ann")) as client:
        client.post("/v1/responses", json={"input": "hi", "background": True})
        file = {"file": ("x", json.dumps(line).encode())}
        form = {"files": file, "data": {"purpose": "batch"}}
        source = client.post("/v1/files", **form).json()["id"]
        body = {"input_file_id": source, "endpoint": CHAT, "completion_window": "24h"}
        assert client.post("/v1/batches", json=body).status_code == 200
    end = time.monotonic() + 300
    while len(shared.engine.salts) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert set(shared.engine.salts) == {ann}


def test_one_key_or_a_flag_shares(make_server: ServerMaker) -> None:
    share = {"share_prefix_cache_between_keys": True}
    for flags in ({"api_key": ("ann", "ann")}, {"api_key": ("ann", "bob"), **share}):
        live = make_server(**flags)
        keys: Any = flags["api_key"]
        assert salts(live, CHAT, keys) == [None, None]
        assert salts(live, CHAT, keys, cache_salt="x") == ["x", "x"]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = make_tiny(tmp_path_factory.mktemp("tenants") / "tiny", "Qwen3ForCausalLM")
    engine = AsyncLLM(
        str(folder), served_model_name=("M",), cpu_threads=1, max_model_len=256,
        disable_frontend_multiprocessing=True, api_key=("ann", "bob"),
        enable_prompt_tokens_details=True, disable_uvicorn_access_log=True,
    )  # fmt: skip
    with serve_in_thread(engine, engine.info.config) as live:
        yield live
    engine.shutdown()


def cached(live: Live, key: str) -> int:
    body = {"prompt": LONG, "max_tokens": 1, "truncate_prompt_tokens": 200}
    with live.client(headers=headers(key)) as client:
        usage = client.post("/v1/completions", json=body).json()["usage"]
    return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def test_a171_what_one_key_has_asked_is_not_cached_for_another(real: Live) -> None:
    assert cached(real, "ann") == 0
    mine = cached(real, "ann")
    assert mine > 0
    assert cached(real, "bob") == 0
    assert cached(real, "bob") == mine


def test_a163_what_is_stored_for_one_key_is_not_there_for_another(shared: Live) -> None:
    with shared.client(headers=headers("ann")) as client:
        response_id = client.post("/v1/responses", json={"input": "hi"}).json()["id"]
        assert client.get(f"/v1/responses/{response_id}").status_code == 200
    with shared.client(headers=headers("bob")) as client:
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"),
                             ("GET", "/input_items")):  # fmt: skip
            answer = client.request(method, f"/v1/responses/{response_id}{path}")
            assert answer.status_code == 404, (method, path)
        follow = {"input": "hi", "previous_response_id": response_id}
        assert client.post("/v1/responses", json=follow).status_code == 404
    with shared.client(headers=headers("ann")) as client:
        assert client.get(f"/v1/responses/{response_id}").status_code == 200


def test_conversations_belong_to_their_key(shared: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    with shared.client(headers=headers("ann")) as ann:
        name = ann.post("/v1/conversations", json={}).json()["id"]
        request = {"input": "hi", "conversation": name}
        assert ann.post("/v1/responses", json=request).status_code == 200
        with shared.client(headers=headers("bob")) as bob:
            one = f"/v1/conversations/{name}"
            for method, path, body in (
                ("GET", one, None), ("DELETE", one, None), ("GET", f"{one}/items", None),
                ("POST", one, {"metadata": {}}), ("POST", f"{one}/items", {"items": []}),
                ("POST", "/v1/responses", request),
            ):  # fmt: skip
                assert bob.request(method, path, json=body).status_code == 404, (method, path)
            family = next(f for f in shared.served.families if f.name == "responses")
            monkeypatch.setattr(family._conversations, "_max_conversations", 5)  # type: ignore[attr-defined]
            for _ in range(8):
                assert bob.post("/v1/conversations", json={}).status_code == 200
        assert ann.get(one).status_code == 200


def stored(owner: str, number: int) -> Stored:
    return Stored(owner, {"id": f"{owner}-{number}", "status": "completed"})


def test_nobody_pushes_out_what_another_one_has_stored() -> None:
    store = Store(max_responses=10)
    for number in range(3):
        store.put(stored("ann", number))
    for number in range(50):
        store.put(stored("bob", number))
    assert [store.get(f"ann-{number}", "ann").owner for number in range(3)] == ["ann"] * 3
    assert store.get("bob-49", "bob")
    assert len(store) == 10


def test_logs_say_whose_a_request_is_and_metrics_do_not(
    shared: Live, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        salts(shared, CHAT, ("ann", "bob"))
    lines = [r.getMessage() for r in caplog.records if r.name == "modulm.requests"]
    whose = {line.split()[3].rstrip(":") for line in lines}
    assert len(whose) == 2
    with shared.client(headers=headers("bob")) as client:
        metrics = client.get("/metrics").text
    assert not any(name in metrics for name in whose)
