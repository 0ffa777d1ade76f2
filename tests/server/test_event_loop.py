"""No request holds the event loop: CPU time of its thread within one callback, which other
processes of the machine do not change."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modulm_route_files.batch import Batch
from modulm_route_files.batch_store import BatchStore
from modulm_route_files.lines import LinesError, check_lines, read_lines
from modulm_route_files.slots import Slots
from modulm_route_files.store import FileStore
from modulm_server.testing import Live, error_of

ServerMaker = Callable[..., Live]
CHAT = "/v1/chat/completions"
#: CPU seconds; what was wrong took 4 and more.
BOUND = 0.75


@pytest.fixture
def longest(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """CPU seconds of the longest callback so far on the loops of servers under test."""
    most = [0.0]
    run = asyncio.events.Handle._run

    def timed(handle: Any) -> None:
        began = time.thread_time()
        run(handle)
        if threading.current_thread().name == "test-server":
            most[0] = max(most[0], time.thread_time() - began)

    monkeypatch.setattr(asyncio.events.Handle, "_run", timed)
    return most


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


@pytest.mark.parametrize("name", LARGEST)
def test_a_large_batch_file_is_read_off_the_loop(
    make_server: ServerMaker, longest: list[float], tmp_path: Path, name: str
) -> None:
    """At upload, and where an older server has stored it."""
    with make_server(file_storage_path=str(tmp_path)).client() as http:
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
    assert longest[0] < BOUND


BODIES: dict[str, Any] = {
    CHAT: {"model": "M", "messages": [{"role": "user", "content": "a b " * (4 << 20)}]},
    "/v1/completions": {"model": "M", "prompt": [[1] * 900] * 2048},
    "/v1/embeddings": {"model": "M", "input": ["a b"] * (1 << 20)},
    "/v1/responses": {"model": "M", "input": "a b " * (4 << 20)},
    "/v1/messages": {
        "model": "M",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "hi"}] * 100_000,
    },
    "/tokenize": {"model": "M", "prompt": "a b " * (4 << 20)},
    "/v1/conversations": {"items": [{"role": "user", "content": "hi"}] * 100_000},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_large_body_is_read_off_the_loop(live: Live, longest: list[float], path: str) -> None:
    with live.client() as http:
        answer = http.post(path, json=BODIES[path])
    assert answer.status_code in (400, 404, 413), answer.text[:300]
    assert longest[0] < BOUND


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
