"""No request holds the event loop: CPU time of its thread in one turn, which other processes of
the machine hardly change."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from largest_inputs import inputs_of
from loop_turns import BOUND, Beat
from samples import parametrize_sample

from modulm_route_files.batch import Batch
from modulm_route_files.batch_store import BatchStore
from modulm_route_files.lines import LinesError, check_lines, read_lines
from modulm_route_files.slots import Slots
from modulm_route_files.store import FileStore
from modulm_server.testing import Live, error_of

ServerMaker = Callable[..., Live]
CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """A collection walks all objects of the tests, in whichever thread it starts."""
    gc.disable()
    yield
    gc.enable()


def test_a_turn_that_is_too_long_is_noticed(live: Live) -> None:
    beat = Beat(live.loop)

    def work() -> None:
        while time.thread_time() < end:
            pass

    def start() -> None:
        nonlocal end
        end = time.thread_time() + 2 * BOUND
        work()

    end = 0.0
    live.loop.call_soon_threadsafe(start)
    assert beat.end() > BOUND


def ended(http: Any, identity: str) -> dict[str, Any]:
    while True:
        batch: dict[str, Any] = http.get(f"/v1/batches/{identity}").json()
        if batch["status"] in ("completed", "failed", "cancelled"):
            return batch


LARGEST = {
    "many lines": b"1\n" * (8 << 20),
    "blank lines": b"\n" * (8 << 20),
    "many values": b"[" + b"1," * (8 << 20) + b"1]",
    "one long line": b'{"custom_id": "' + b"x" * (32 << 20) + b'"}',
}


@parametrize_sample("name", LARGEST, every=4)
def test_a_large_batch_file_is_read_off_the_loop(
    make_server: ServerMaker, tmp_path: Path, name: str
) -> None:
    """At upload, and where an older server has stored it."""
    live = make_server(file_storage_path=str(tmp_path))
    beat = Beat(live.loop)
    with live.client() as http:
        parts = {"data": {"purpose": "batch"}, "files": {"file": ("x", LARGEST[name])}}
        answer = http.post("/v1/files", **parts)
        if name == "one long line":
            assert answer.status_code == 200, answer.text
        else:
            assert error_of(answer)["param"] == "file"
        parts["files"] = {"file": ("x", b"{}")}
        stored = http.post("/v1/files", **parts).json()["id"]
        (tmp_path / "files" / stored).write_bytes(LARGEST[name])
        body = {"input_file_id": stored, "endpoint": CHAT}
        batch = ended(http, http.post("/v1/batches", json=body).json()["id"])
        assert batch["output_file_id"] is None or batch["request_counts"]["completed"] == 0
    assert beat.end() < BOUND


BODIES: dict[str, Any] = {
    CHAT: {"model": "M", "messages": [{"role": "user", "content": "a b " * (4 << 20)}]},
    "/v1/completions": {"model": "M", "prompt": [[1] * 900] * 2048},
    "/v1/embeddings": {"model": "M", "input": ["a b"] * (1 << 20)},
    "/v1/responses": {"model": "M", "input": "a b " * (15 << 20)},  # almost --max-request-bytes
    "/v1/messages": {
        "model": "M",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "hi"}] * 100_000,
    },
    "/tokenize": {"model": "M", "prompt": "a b " * (4 << 20)},
    "/v1/conversations": {"items": [{"role": "user", "content": "hi"}] * 100_000},
}


@parametrize_sample("path", BODIES, every=4)
def test_a_large_body_is_read_off_the_loop(live: Live, path: str) -> None:
    beat = Beat(live.loop)
    with live.client() as http:
        answer = http.post(path, json=BODIES[path])
    assert answer.status_code in (400, 404, 413), answer.text[:300]
    assert beat.end() < BOUND


IDS, WORDS = [5] * 900_000, "a b " * 200_000
TURN = {"role": "user", "content": "hi there"}
TOOLS = [
    {"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object"}}}
    for i in range(1024)
]
#: The largest bodies that are answered, and some that only look so: (path, body, status).
ACCEPTED: dict[str, tuple[str, dict[str, Any], int]] = {
    "chat turns": (CHAT, {"messages": [TURN] * 16_000}, 200),
    "chat text": (CHAT, {"messages": [{"role": "user", "content": WORDS}]}, 200),
    "chat tools": (CHAT, {"messages": [TURN], "tools": TOOLS}, 200),
    "chat ids": (CHAT, {"messages": [TURN], "allowed_token_ids": [1] * 2_000_000}, 400),
    "prompts": ("/v1/completions", {"prompt": ["a b c"] * 2_048}, 200),
    "lists of ids": ("/v1/completions", {"prompt": [[5] * 900] * 2_048}, 200),
    "ids": ("/v1/completions", {"prompt": IDS}, 200),
    "anthropic": (
        "/v1/messages",
        {
            "max_tokens": 1,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 90_000}],
        },
        200,
    ),
    "responses": ("/v1/responses", {"input": [TURN] * 16_000}, 200),
    "llama.cpp ids": ("/completion", {"prompt": IDS}, 200),
    "llama.cpp mixed": ("/completion", {"prompt": ["a", 5] * 300_000}, 200),
    "llama.cpp prompts": ("/completion", {"prompt": ["a b c"] * 2_048}, 200),
    "llama.cpp biases": ("/completion", {"prompt": "x", "logit_bias": [["a", 1.0]] * 120_000}, 200),
    "llama.cpp samplers": ("/completion", {"prompt": "x", "samplers": ["top_k"] * 1_000_000}, 400),
    "llama.cpp fields": (
        "/completion",
        {"prompt": "x", "response_fields": ["content"] * 1_000_000},
        400,
    ),
    "llama.cpp template": ("/apply-template", {"messages": [TURN] * 16_000}, 200),
    "ollama turns": ("/api/chat", {"messages": [TURN] * 16_000, "stream": False}, 200),
    "ollama context": ("/api/generate", {"prompt": "x", "context": IDS, "stream": False}, 200),
    "ollama images": ("/api/chat", {"messages": [{**TURN, "images": ["aGk="] * 100_000}]}, 400),
    "detokenize": ("/detokenize", {"tokens": IDS}, 200),
    "pieces": ("/tokenize", {"content": WORDS, "with_pieces": True}, 200),
}
#: Of pooling models: with the tasks of the engine.
POOLED: dict[str, tuple[str, dict[str, Any], int]] = {
    "embeddings": ("/v1/embeddings", {"input": ["a b" * 50] * 2_048}, 200),
    "embeddings of ids": ("/v1/embeddings", {"input": [[5] * 900] * 2_048}, 200),
    "one of ids": ("/v1/embeddings", {"input": IDS}, 200),
    "cohere": ("/v2/embed", {"texts": ["a b" * 50] * 2_048, "input_type": "search_query"}, 200),
    "cohere kinds": (
        "/v2/embed",
        {"texts": ["a"], "input_type": "search_query", "embedding_types": ["float"] * 1_000_000},
        400,
    ),
    "ollama": ("/api/embed", {"input": ["a b"] * 2_048}, 200),
    "llama.cpp": ("/embedding", {"content": ["a b"] * 2_048}, 200),
    "rerank": ("/rerank", {"query": "q", "documents": ["a b" * 50] * 2_047}, 200),
    "score": ("/score", {"text_1": ["a b" * 50] * 2_047, "text_2": ["a b" * 50] * 2_047}, 200),
}


@pytest.fixture(scope="module")
def wide(make_server: ServerMaker) -> Live:
    """A server of a model with a context of a million tokens."""
    return make_server({"max_model_len": 1 << 20}, enable_auto_tool_choice=True,
                       tool_call_parser="hermes")  # fmt: skip


@pytest.fixture(scope="module")
def pooling(make_server: ServerMaker) -> Live:
    return make_server({"max_model_len": 1 << 20, "tasks": ("embed",)})


def longest_turn(live: Live, path: str, body: dict[str, Any], status: int) -> float:
    """CPU seconds of the longest turn while a request is answered."""
    data = json.dumps({"model": "M", **body}).encode()
    with live.client() as http:
        http.get("/v1/models")
        beat = Beat(live.loop)
        answer = http.post(path, content=data, headers={"Content-Type": "application/json"})
    longest = beat.end()
    assert answer.status_code == status, answer.text[:300]
    return longest


@parametrize_sample("name", ACCEPTED, every=12)
def test_the_largest_bodies_are_answered_off_the_loop(wide: Live, name: str) -> None:
    assert longest_turn(wide, *ACCEPTED[name]) < BOUND


@parametrize_sample("name", POOLED, every=9)
def test_the_largest_inputs_are_pooled_off_the_loop(pooling: Live, name: str) -> None:
    assert longest_turn(pooling, *POOLED[name]) < BOUND


def line(number: int, **body: Any) -> bytes:
    return json.dumps({"custom_id": f"{number}", "url": CHAT, "body": body}).encode() + b"\n"


def test_reading_stops_at_the_limits(tmp_path: Path) -> None:
    class Endless(io.BytesIO):
        """Counts the lines that were read."""

        count = 0

        def readline(self, size: int | None = -1) -> bytes:
            self.count += 1
            return b"1\n"

    endless = Endless()
    with pytest.raises(LinesError, match="1 to 50000 lines"):
        check_lines(endless, 100)
    assert endless.count == 50_001
    with pytest.raises(LinesError, match="line 2 has more than 9 bytes"):
        check_lines(io.BytesIO(b"1\n" + b"x" * 50), 9)
    many = b"1\n[" + b"[]," * (1 << 19) + b"1]\n"
    with pytest.raises(LinesError, match="line 2: the body has more than"):
        check_lines(io.BytesIO(many), 1 << 30)
    path = tmp_path / "x"
    path.write_bytes(many + line(3, a=1) + line(4) + line(5, stream=True))
    lines = list(read_lines(path, 1 << 30, CHAT, {0, 3}))
    assert [one.number for one in lines] == [1, 2, 4]
    assert (lines[0].error or "").startswith("the body has more than")
    assert (lines[1].body, lines[1].error) == (b'{"a": 1}', None)
    assert "stream" in (lines[2].error or "")


def test_a_batch_that_ends_its_servers_is_not_tried_for_ever(tmp_path: Path) -> None:
    """The state on disk is all that a server that dies leaves."""

    def start_server() -> tuple[int, str]:
        """Resume what is stored and die at once; returns (batches that ran, status)."""
        batches = BatchStore(FileStore(tmp_path, 9, 1 << 20, lasting=True))
        started: list[Batch] = []

        async def work(batch: Batch) -> None:
            started.append(batch)
            (state / f"{batch.id}.copy").write_bytes((state / f"{batch.id}.json").read_bytes())

        async def main() -> None:
            batches.resume(work)
            while batches.running:
                await asyncio.sleep(0)

        asyncio.run(main())
        for copy in state.glob("*.copy"):
            copy.rename(copy.with_suffix(".json"))
        (batch,) = batches.all()
        return len(started), batch.status

    state = tmp_path / "batches"
    FileStore(tmp_path, 9, 1 << 20, lasting=True).folder.exists()
    batch = Batch("me", CHAT, "24h", "file-x")
    (state / f"{batch.id}.json").write_text(json.dumps(batch.table()))
    assert [start_server() for _ in range(5)] == [(1, "validating")] * 3 + [(0, "failed")] * 2


@pytest.mark.parametrize("place", ["its lines", "its state"])
def test_a_batch_that_no_thread_can_be_started_for_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    files = FileStore(tmp_path, 9, 1 << 20, lasting=True)
    batches = BatchStore(files)
    batch = Batch("me", CHAT, "24h", "file-x")

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        loopback: Any = None
        monkeypatch.setattr(threading.Thread, "start", start)
        if place == "its lines":
            batches.start(batch, lambda one: one.run(files, loopback, Slots()))
        else:  # it goes on while its state cannot be saved
            monkeypatch.setattr("modulm_route_files.batch_store._CHECK_INTERVAL", 0)
            batches.start(batch, lambda one: asyncio.sleep(3600))
        while batches.running:
            await asyncio.sleep(0)
        monkeypatch.undo()

    asyncio.run(main())
    (stored,) = BatchStore(FileStore(tmp_path, 9, 1 << 20, lasting=True)).all()
    assert stored.status == "failed"
    assert [one["code"] for one in stored.trouble] == ["internal_error"]
    assert not list((tmp_path / "batches").glob("*.lock"))


def test_stored_files_and_batches_are_read_off_the_loop(
    make_server: ServerMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = make_server(file_storage_path=str(tmp_path))
    threads: set[int] = set()
    called: set[str] = set()
    here: list[int] = []
    for kind, name in ((Batch, "of"), (FileStore, "_scan"), (BatchStore, "_claim")):
        original = getattr(kind, name)

        def noted(*args: Any, original: Callable[..., Any] = original, name: str = name) -> Any:
            threads.add(threading.get_ident())
            called.add(name)
            return original(*args)

        monkeypatch.setattr(kind, name, noted)
    live.loop.call_soon_threadsafe(lambda: here.append(threading.get_ident()))
    with live.client() as http:
        parts: Any = {"data": {"purpose": "evals"}, "files": {"file": ("x", b"x")}}
        card = http.post("/v1/files", **parts).json()
        stored = [Batch("", CHAT, "24h", card["id"]) for _ in range(2)]
        for batch in stored:
            batch.enter("completed")
            path = tmp_path / "batches" / f"{batch.id}.json"
            path.write_text(json.dumps(batch.table()))
        assert http.get(f"/v1/batches/{stored[0].id}").status_code == 200
        assert http.get("/v1/batches/batch_x").status_code == 404
        assert len(http.get("/v1/batches").json()["data"]) == 2
        assert [file["id"] for file in http.get("/v1/files").json()["data"]] == [card["id"]]
        assert http.get(f"/v1/files/{card['id']}").json() == card
        assert http.get(f"/v1/files/{card['id']}/content").content == b"x"
        assert http.delete(f"/v1/files/{card['id']}").json()["deleted"] is True
        source = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("x", b"1")})
        body = {"input_file_id": source.json()["id"], "endpoint": CHAT}
        assert http.post("/v1/batches", json=body).status_code == 200
    assert called == {"of", "_scan", "_claim"}
    assert not threads & set(here)


def test_lines_of_a_key_share_their_slots() -> None:
    async def main() -> list[bool]:
        slots = Slots()
        for _ in range(31):
            await slots.acquire(1)
        large = asyncio.ensure_future(slots.acquire(1 << 30))
        await asyncio.sleep(0)
        waits = [large.done()]
        for _ in range(31):
            slots.release(1)
        await large
        other = asyncio.ensure_future(slots.acquire(1))
        await asyncio.sleep(0)
        waits.append(other.done())
        slots.release(1 << 30)
        await other
        return waits

    assert asyncio.run(main()) == [False, False]


def test_a_key_cannot_use_up_the_files_of_another(make_server: ServerMaker) -> None:
    live = make_server(api_key=("ann", "bob"), max_stored_files=4, max_stored_bytes=2000)
    ann, bob = ({"Authorization": f"Bearer {key}"} for key in ("ann", "bob"))
    parts: Any = {"data": {"purpose": "evals"}, "files": {"file": ("x", b"x")}}
    with live.client() as http:
        mine = [http.post("/v1/files", headers=ann, **parts).status_code for _ in range(4)]
        theirs = [http.post("/v1/files", headers=bob, **parts).status_code for _ in range(2)]
    assert (mine, theirs) == ([200, 200, 429, 429], [200, 200])


@pytest.fixture(scope="module")
def complete(make_server: ServerMaker, tmp_path_factory: pytest.TempPathFactory) -> Live:
    """A server with all families of routes."""
    folder = str(tmp_path_factory.mktemp("adapters"))
    return make_server(
        {
            "tasks": ("generate", "embed", "classify", "score"), "max_model_len": 1 << 20,
            "parts": {"adapters": {"slots": 2}},
        },
        enable_lora=True, allow_runtime_lora_updating=True, allowed_lora_path=(folder,),
        server_dev_mode=True, enable_tokenizer_info_endpoint=True,
    )  # fmt: skip


def test_every_route_has_a_largest_input(complete: Live) -> None:
    """Other than sockets, whose events `tests/server/test_transcription.py` sends."""
    routes = complete.served.api.router.routes
    inputs = inputs_of(complete.served.api)
    assert len(inputs) > 90
    unwatched = {r.path for r in routes if not getattr(r, "methods", None)}  # type: ignore[attr-defined]
    assert unwatched <= {"/v1/realtime"}


@parametrize_sample("part", range(40), every=20)
def test_the_largest_input_of_each_route_is_read_off_the_loop(complete: Live, part: int) -> None:
    """What a route refuses counts too: it has read it first."""
    slow = []
    for one in inputs_of(complete.served.api)[part::40]:
        with complete.client() as http:
            http.get("/v1/models")
            beat = Beat(complete.loop)
            answer = http.request(one.method, one.url, **one.arguments)
        longest = beat.end()
        assert answer.status_code < 500 or answer.status_code == 501, (one.path, answer.text[:300])
        if longest >= BOUND:
            slow.append(f"{one.method} {one.path}: {longest:.3f} s")
    assert not slow, "\n".join(slow)
