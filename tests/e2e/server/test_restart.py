"""`--restart`: an engine that dies is brought back, and requests that had not begun run again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from modulm import AsyncLLM
from modulm_server.engine import replica_processes, replicas
from modulm_server.testing import Live, serve_in_thread

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def live(tiny_folder: Path) -> Iterator[Live]:
    llm = AsyncLLM(
        str(tiny_folder), restart=True, served_model_name=("M",), cpu_threads=1,
        hf_overrides={"max_position_embeddings": 4096}, max_model_len=4096,
        num_gpu_blocks_override=512, max_num_seqs=4,
    )  # fmt: skip
    try:
        with serve_in_thread(llm, llm.info.config) as live:
            yield live
    finally:
        llm.shutdown()


def engine_of(live: Live) -> int:
    pid: int = live.engine._core._replicas[0].client._owned.pid
    return pid


async def stream(http: httpx.AsyncClient, begun: asyncio.Event) -> str:
    body = {
        "model": "M",
        "prompt": [5, 6, 7],
        "max_tokens": 4000,
        "stream": True,
        "ignore_eos": True,
    }
    end = "cut"
    async with http.stream("POST", COMPLETIONS, json=body) as answer:
        async for line in answer.aiter_lines():
            begun.set()
            if line == "data: [DONE]" and end == "cut":
                end = "done"
            elif '"error"' in line:
                end = json.loads(line.partition("data: ")[2] or line)["error"]["code"]
    return end


async def plain(http: httpx.AsyncClient) -> Any:
    body = {"model": "M", "prompt": [8, 9], "max_tokens": 40, "ignore_eos": True}
    answer = await http.post(COMPLETIONS, json=body)
    return answer.json()


def test_an_engine_that_dies_is_brought_back(live: Live) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(base_url=live.url, timeout=300) as http:
            body = {"model": "M", "prompt": [8], "max_tokens": 2}
            line = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": body}
            content = json.dumps(line).encode()
            file = {"file": ("x", content)}
            stored = (await http.post("/v1/files", data={"purpose": "batch"}, files=file)).json()[
                "id"
            ]
            assert not [path for path in Path().iterdir() if "[" in path.name]
            begun = asyncio.Event()
            streaming = asyncio.create_task(stream(http, begun))
            await begun.wait()
            os.kill(engine_of(live), signal.SIGSTOP)
            waiting = [asyncio.create_task(plain(http)) for _ in range(6)]
            while live.engine.active < 7 and not streaming.done():
                await asyncio.sleep(0.01)
            os.kill(engine_of(live), signal.SIGKILL)
            assert await streaming == "replica_died"
            while (health := await http.get("/health")).status_code == 200:
                await asyncio.sleep(0)
            assert health.status_code == 503
            away = health.json()
            assert away["error"]["code"] == "engine_restarting"
            assert away["status"] == "unavailable"
            assert away["replicas"][0]["status"] in ("dead", "starting")
            refused = await http.post(COMPLETIONS, json={"model": "M", "prompt": [1]})
            assert refused.json()["error"]["code"] == "engine_restarting"
            assert "retry-after" in refused.headers
            asked = {"input_file_id": stored, "endpoint": COMPLETIONS, "completion_window": "24h"}
            batch = (await http.post("/v1/batches", json=asked)).json()
            answers = await asyncio.gather(*waiting)
            assert [a["usage"]["completion_tokens"] for a in answers] == [40] * 6
            assert (await http.get("/health")).json() == {
                "status": "ok",
                "replicas": [{"rank": 0, "status": "ok", "restarts": 1}],
            }
            assert (await http.get(f"/v1/files/{stored}/content")).content == content
            async with asyncio.timeout(300):
                while batch["status"] != "completed":
                    batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
            assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
            assert (await http.get("/load")).json() == {"server_load": 0}

    asyncio.run(main())


def test_tries_are_bounded(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second death in a row is one too many here: the server says so, and ends."""
    monkeypatch.setattr(replica_processes, "_STARTS", 1)
    monkeypatch.setattr(replicas, "_BACKOFF", 0.0)
    os.kill(engine_of(live), signal.SIGKILL)
    with live.client() as http:
        deadline = time.monotonic() + 300
        while (health := http.get("/health").json()).get("error", {}).get("code") != "engine_dead":
            assert time.monotonic() < deadline, health
    assert live.engine.dead is not None
    assert "restarted too often" in str(live.engine.dead)
