"""What reaches the awaits, socket and file operations of a server: one short exchange a scenario.

Each scenario may end with an error, which is what a client sees of a fault, and leaves nothing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx

from modulm_server.testing import Live

__all__ = ["SCENARIOS", "Scenario"]

Scenario = Callable[[Live, httpx.Client], object]
CHAT = "/v1/chat/completions"
TURN = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
SCENARIOS: dict[str, Scenario] = {}

#: Bodies of a request each, answered at once and, where the route streams, as events.
POSTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TURN, "max_tokens": 2, "stream": True},
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 2, "stream": True},
    f"{CHAT}/batch": {"messages": [TURN, TURN], "max_tokens": 1},
    "/generative_scoring": {"query": "a", "items": ["b"], "label_token_ids": [5]},
    "/v1/responses": {"input": "a", "max_output_tokens": 2, "stream": True},
    "/v1/messages": {"messages": TURN, "max_tokens": 2, "stream": True},
    "/v1/messages/count_tokens": {"messages": TURN},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/embeddings": {"input": ["hello", "a"]},
    "/v2/embed": {"texts": ["a"]},
    "/pooling": {"input": "a"},
    "/classify": {"input": "a"},
    "/api/chat": {"messages": TURN, "stream": True},
    "/api/generate": {"prompt": "a", "stream": True},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/api/show": {},
    "/api/pull": {"stream": True},
    "/completion": {"prompt": ["a", "b"], "n_predict": 1, "stream": True},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/apply-template": {"messages": TURN},
    "/embedding": {"content": "a"},
    "/props": {},
    "/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "a b"},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/completions/render": {"prompt": "a"},
    f"{CHAT}/render": {"messages": TURN},
    "/invocations": {"messages": TURN, "max_tokens": 1},
    "/pause": {},
    "/resume": {},
    "/sleep": {},
    "/wake_up": {},
    "/reset_prefix_cache": {},
    "/collective_rpc": {"method": "x"},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "/none"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
}
GETS = (
    "/health", "/ready", "/ping", "/version", "/v1/models", "/v1/models/M", "/metrics", "/load",
    "/openapi.json", "/api/tags", "/api/ps", "/api/version", "/props", "/slots", "/server_info",
    "/is_sleeping", "/is_paused", "/tokenizer_info", "/v1/lora_adapters", "/lora-adapters", "/",
    "/v1/files", "/v1/batches", "/get_world_size", "/models",
)  # fmt: skip


def _post(path: str, body: dict[str, Any]) -> Scenario:
    def run(live: Live, http: httpx.Client) -> object:
        answers = [http.post(path, json={"model": "M", **body})]
        if body.get("stream"):
            answers.append(http.post(path, json={"model": "M", **body, "stream": False}))
        return answers

    return run


def _get(path: str) -> Scenario:
    return lambda live, http: http.get(path)


for _path, _body in POSTS.items():
    SCENARIOS[f"POST {_path}"] = _post(_path, _body)
for _path in GETS:
    SCENARIOS[f"GET {_path}"] = _get(_path)


def _scenario(run: Scenario) -> Scenario:
    SCENARIOS[run.__name__.replace("_", " ").strip()] = run
    return run


def _upload(http: httpx.Client, content: bytes, purpose: str = "batch") -> str | None:
    data = {"purpose": purpose}
    answer = http.post("/v1/files", data=data, files={"file": ("x", content)})
    return answer.json()["id"] if answer.is_success else None


@_scenario
def files(live: Live, http: httpx.Client) -> None:
    identity = _upload(http, b"some text", "user_data")
    http.get("/v1/files")
    for path in (f"/v1/files/{identity}", f"/v1/files/{identity}/content"):
        http.get(path)
    http.delete(f"/v1/files/{identity}")


def _batch(http: httpx.Client, cancel: bool) -> None:
    lines = [
        {"custom_id": str(number), "method": "POST", "url": CHAT,
         "body": {"model": "M", "messages": TURN, "max_tokens": 1}}
        for number in range(2)
    ]  # fmt: skip
    identity = _upload(http, b"\n".join(json.dumps(line).encode() for line in lines))
    body = {"input_file_id": identity, "endpoint": CHAT, "completion_window": "24h"}
    answer = http.post("/v1/batches", json=body)
    if not answer.is_success:
        return
    batch = answer.json()
    if cancel:
        http.post(f"/v1/batches/{batch['id']}/cancel")
    end = time.monotonic() + 60
    while batch["status"] not in ("completed", "failed", "cancelled"):
        assert time.monotonic() < end, f"the batch does not end: {batch}"
        time.sleep(0.002)
        answer = http.get(f"/v1/batches/{batch['id']}")
        batch = answer.json() if answer.is_success else batch
    for name in ("output_file_id", "error_file_id"):
        if batch[name]:
            http.get(f"/v1/files/{batch[name]}/content")
    http.get("/v1/batches")


@_scenario
def a_batch(live: Live, http: httpx.Client) -> None:
    _batch(http, cancel=False)


@_scenario
def a_batch_that_is_cancelled(live: Live, http: httpx.Client) -> None:
    _batch(http, cancel=True)


@_scenario
def tools(live: Live, http: httpx.Client) -> None:
    turns = [{"role": "user", "content": "call a tool"}]
    body = {"model": "M", "messages": turns, "tools": [TOOL], "max_tokens": 60}
    for stream in (False, True):
        http.post(CHAT, json={**body, "stream": stream})
        http.post("/v1/responses", json={
            "model": "M", "input": "call a tool", "stream": stream,
            "tools": [{"type": "function", **TOOL["function"]}],
        })  # fmt: skip
    http.post(CHAT, json={**body, "tool_choice": "required"})


@_scenario
def stored_responses(live: Live, http: httpx.Client) -> None:
    conversation = http.post("/v1/conversations", json={"items": [{**TURN[0], "type": "message"}]})
    identity = conversation.json().get("id")
    for path in ("", "/items"):
        http.get(f"/v1/conversations/{identity}{path}")
    body = {"model": "M", "input": "a", "max_output_tokens": 1}
    first = http.post("/v1/responses", json={**body, "conversation": identity}).json().get("id")
    http.post("/v1/responses", json={**body, "previous_response_id": first})
    http.get(f"/v1/responses/{first}")
    http.get(f"/v1/responses/{first}/input_items")
    late = http.post("/v1/responses", json={**body, "background": True}).json().get("id")
    http.post(f"/v1/responses/{late}/cancel")
    http.delete(f"/v1/responses/{first}")
    http.post(f"/v1/conversations/{identity}", json={"metadata": {"a": "b"}})
    http.delete(f"/v1/conversations/{identity}")


@_scenario
def choices_beams_and_logprobs(live: Live, http: httpx.Client) -> None:
    body = {"model": "M", "messages": TURN, "max_tokens": 2}
    http.post(CHAT, json={**body, "n": 2, "logprobs": True, "top_logprobs": 2})
    http.post(CHAT, json={**body, "n": 2, "stream": True})
    http.post("/v1/completions", json={
        "model": "M", "prompt": "a", "max_tokens": 2, "echo": True, "logprobs": 1,
    })  # fmt: skip
    http.post("/v1/completions", json={
        "model": "M", "prompt": "a", "max_tokens": 2, "use_beam_search": True, "n": 2,
    })  # fmt: skip


@_scenario
def refusals(live: Live, http: httpx.Client) -> None:
    for content in (b"{", b"", b"[]", b"\xff", b'{"model": "none", "messages": []}'):
        http.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    http.post(CHAT, json={"messages": [{"role": "user", "content": "queue is full"}]})
    http.post(CHAT, json={"messages": [{"role": "user", "content": "fail late"}], "stream": True})
    http.get("/none")
    http.post("/v1/files", content=b"--x\r\nbroken", headers={
        "Content-Type": "multipart/form-data; boundary=x",
    })  # fmt: skip
    http.post(CHAT, json={"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
    ]}]})  # fmt: skip


@_scenario
def a_client_that_leaves(live: Live, http: httpx.Client) -> None:
    body = {"model": "M", "messages": [{"role": "user", "content": "count slowly"}],
            "max_tokens": 200, "stream": True}  # fmt: skip
    with http.stream("POST", CHAT, json=body) as answer:
        for _ in answer.iter_bytes(1):
            break


@_scenario
def adapters(live: Live, http: httpx.Client) -> None:
    body = {"lora_name": "poet", "lora_path": "poet"}
    http.post("/v1/load_lora_adapter", json=body)
    http.post(CHAT, json={"model": "poet", "messages": TURN, "max_tokens": 1})
    http.post("/v1/unload_lora_adapter", json={"lora_name": "poet"})


@_scenario
def two_at_once(live: Live, http: httpx.Client) -> None:
    body = {"model": "M", "messages": TURN, "max_tokens": 1}
    other = threading.Thread(target=lambda: _quiet(lambda: http.post(CHAT, json=body)))
    other.start()
    try:
        http.post(CHAT, json=body)
    finally:
        other.join()


def _quiet(run: Callable[[], object]) -> None:
    with suppress(httpx.HTTPError):
        run()
