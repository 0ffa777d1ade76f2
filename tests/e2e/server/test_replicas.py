"""Several replicas behind one door, as processes: one of this machine's front end, one of another
"machine" without any, two server processes in front; and what becomes of all when some are killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import define
from samples import parametrize_sample

from modulm import AsyncLLM, SamplingParams
from modulm.contracts.sampling import OutputKind

COMPLETIONS = "/v1/completions"
#: Seconds within which a death must be told.
SOON = 300.0


def free_ports() -> tuple[int, int]:
    """A port to serve on, and one with two free ones behind it."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


def family(pid: int) -> list[int]:
    """A process and all that it has started, and they."""
    pids = [pid]
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in tasks.read_text().split():
            pids += family(int(child))
    return pids


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], Any], what: str, seconds: float = 300.0) -> float:
    """Wait for something to be true; how long that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, what
        time.sleep(0.02)
    return time.monotonic() - began


@define(eq=False)
class Serving:
    """`modulm serve`, and the process with a replica for it, if it has one."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    others: subprocess.Popen[bytes] | None = None

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=300)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=300)

    def status(self) -> int:
        """Of /health; 0 where nobody answers."""
        try:
            return self.get("/health").status_code
        except httpx.TransportError:
            return 0

    def health(self) -> dict[str, Any]:
        health: dict[str, Any] = self.get("/health").json()
        return health

    def well(self) -> bool:
        return self.health().get("status") == "ok"

    def engine(self, rank: int) -> int:
        """The process of a replica: 0 is the server's, 1 the other one's."""
        owner = self.others if rank and self.others else self.process
        engines = [p for p in family(owner.pid) if "engine_process" in command_of(p)]
        return engines[0]

    def samples(self, name: str) -> dict[str, float]:
        """A metric's values by engine, summed over the other labels."""
        totals: Counter[str] = Counter()
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(f"modulm:{name}{{"):
                totals[line.partition('engine="')[2].partition('"')[0]] += float(line.split()[-1])
        return dict(totals)


def launched(log: Path, *command: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(log.parent)}
    with log.open("wb") as sink:
        return subprocess.Popen(
            [sys.executable, "-m", "modulm.cli.main", "serve", *command],
            stdout=sink, stderr=sink, env=environment,
        )  # fmt: skip


def flags(folder: Path) -> list[str]:
    return [str(folder), "--served-model-name", "M", "--max-model-len", "256",
            "--num-gpu-blocks-override", "128", "--cpu-threads", "1",
            "--enable-sleep-mode", "--max-num-seqs", "8"]  # fmt: skip


@pytest.fixture(scope="module")
def serving(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("replicas")
    (secret := folder / "secret").write_text("what both of them know")
    port, announced = free_ports()
    fleet = ["-dp", "2", "-dpl", "1", "-dpa", "127.0.0.1", "-dpp", str(announced),
             "--data-parallel-secret-file", str(secret)]  # fmt: skip
    arguments = [*flags(tiny_folder), *fleet]
    front = ["--port", str(port), "--api-server-count", "2", "--server-dev-mode"]
    log = folder / "server.log"
    other = launched(folder / "headless.log", *arguments, "--headless", "-dpr", "1")
    server = Serving(launched(log, *arguments, *front), f"http://127.0.0.1:{port}", log, other)
    pids: list[int] = []
    try:
        until(lambda: server.status() == 200, "it did not start")
        yield server
    finally:
        pids = family(server.process.pid) + family(other.pid)
        for process in (server.process, other):
            process.kill()
            process.wait()
        until(lambda: not any(map(alive, pids)), "processes were left behind")
        print(log.read_text()[-6000:], (folder / "headless.log").read_text()[-3000:])
        assert {path.name for path in folder.iterdir()} - {
            "secret",
            "server.log",
            "headless.log",
        } == (set())


def ask(serving: Serving, prompt: list[int], **fields: Any) -> httpx.Response:
    body = {"model": "M", "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    return serving.post(COMPLETIONS, **body)


def test_both_answer_and_each_counts_its_own(serving: Serving) -> None:
    assert serving.health() == {
        "status": "ok",
        "replicas": [{"rank": rank, "status": "ok", "restarts": 0} for rank in (0, 1)],
    }
    prompts = [[7 + n, *range(20, 70)] for n in range(12)]
    first = [ask(serving, prompt, ignore_eos=True).json() for prompt in prompts]
    again = [ask(serving, prompt, ignore_eos=True).json() for prompt in prompts]
    assert [a["choices"][0]["text"] for a in first] == [a["choices"][0]["text"] for a in again]
    tokens = serving.samples("generation_tokens_total")
    assert set(tokens) == {"0", "1"}
    assert sum(tokens.values()) == 2 * 12 * 4
    assert min(tokens.values()) > 0
    # Each prompt has a whole block, which lay where it was sent again, whichever process took it.
    assert sum(serving.samples("prefix_cache_hits_total").values()) == 12 * 32
    assert sum(serving.samples("request_success_total").values()) == 24
    assert serving.get("/load").json() == {"server_load": 0}


def test_what_is_asked_of_the_engine_reaches_all(serving: Serving) -> None:
    assert serving.post("/sleep").status_code == 200
    assert serving.get("/is_sleeping").json() == {"is_sleeping": True}
    assert ask(serving, [5, 6, 7]).status_code == 503
    assert serving.post("/wake_up").status_code == 200
    prompts = [[90 + n, *range(20, 70)] for n in range(4)]
    assert all(ask(serving, prompt).status_code == 200 for prompt in prompts)
    before = sum(serving.samples("prefix_cache_hits_total").values())
    assert serving.post("/reset_prefix_cache").json() == {"success": True}
    assert all(ask(serving, prompt).status_code == 200 for prompt in prompts)
    assert sum(serving.samples("prefix_cache_hits_total").values()) == before


async def _stream(http: httpx.AsyncClient, prompt: list[int], tokens: int) -> str:
    """How a stream ends: done, an error's code, or with nothing said."""
    body = {"model": "M", "prompt": prompt, "max_tokens": tokens, "stream": True,
            "ignore_eos": True}  # fmt: skip
    end = "cut"
    async with http.stream("POST", COMPLETIONS, json=body) as answer:
        async for line in answer.aiter_lines():
            if line == "data: [DONE]" and end == "cut":
                end = "done"
            elif '"error"' in line:
                end = json.loads(line.partition("data: ")[2] or line)["error"]["code"]
    return end


async def _plain(http: httpx.AsyncClient, prompt: list[int], tokens: int) -> str:
    body = {"model": "M", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    answer = await http.post(COMPLETIONS, json=body)
    if answer.status_code == 200:
        assert answer.json()["usage"]["completion_tokens"] == tokens
        return "done"
    return str(answer.json()["error"]["code"])


@parametrize_sample("rank", [0, 1], every=2, ids=["here", "elsewhere"])
def test_a_replica_that_is_killed(serving: Serving, rank: int) -> None:
    """Streams that had begun there end with 503's error, answers begin again elsewhere."""
    restarts = serving.health()["replicas"][rank]["restarts"]
    victim = serving.engine(rank)

    async def main() -> tuple[list[str], list[str]]:
        async with httpx.AsyncClient(base_url=serving.url, timeout=300) as http:
            streams = [asyncio.create_task(_stream(http, [9 + n, 8], 240)) for n in range(6)]
            plain = [asyncio.create_task(_plain(http, [40 + n, 8], 200)) for n in range(6)]
            await asyncio.sleep(0.15)
            os.kill(victim, signal.SIGKILL)
            start = time.monotonic()
            while (health := (await http.get("/health")).json())["status"] == "ok":
                assert time.monotonic() - start < SOON
            assert health["status"] == "degraded"
            return await asyncio.gather(*streams), await asyncio.gather(*plain)

    streams, plain = asyncio.run(main())
    assert set(streams) <= {"done", "replica_died"}
    assert plain == ["done"] * 6
    # A busy machine may be "degraded" for another reason before the death is noticed.
    until(
        lambda: serving.health()["replicas"][rank]["restarts"] == restarts + 1,
        "the replica was not started again",
    )
    until(serving.well, "the replica did not come back")
    assert all(ask(serving, [n, n, n]).status_code == 200 for n in range(30, 38))


@pytest.mark.exhaustive
def test_a_rolling_restart_loses_nothing(serving: Serving) -> None:
    """SIGUSR2 to both machines while requests keep coming: all of them are answered."""
    before = [replica["restarts"] for replica in serving.health()["replicas"]]
    after = [count + 1 for count in before]

    def restarted() -> bool:
        return [r["restarts"] for r in serving.health()["replicas"]] == after and serving.well()

    async def main() -> set[str]:
        ends: set[str] = set()
        complete = asyncio.Event()

        async def caller(http: httpx.AsyncClient, number: int) -> None:
            while not complete.is_set():
                ends.add(await _stream(http, [number, 8], 100))
                ends.add(await _plain(http, [number, 9], 10))

        async with httpx.AsyncClient(base_url=serving.url, timeout=300) as http:
            callers = [asyncio.create_task(caller(http, 40 + n)) for n in range(3)]
            serving.process.send_signal(signal.SIGUSR2)
            await asyncio.to_thread(
                until, lambda: serving.health()["replicas"][0]["restarts"] == after[0], "no restart"
            )
            await asyncio.to_thread(until, serving.well, "the first did not come back")
            assert serving.others is not None
            serving.others.send_signal(signal.SIGUSR2)
            await asyncio.to_thread(until, restarted, "the second did not come back")
            complete.set()
            await asyncio.gather(*callers)
        return ends

    assert asyncio.run(main()) == {"done"}


@pytest.mark.exhaustive
def test_a_short_soak(serving: Serving) -> None:
    """Streams, answers and callers that leave while replicas are killed twice: each request is
    answered or fails with an error that says why, and in the end nothing is held.
    """
    rng = random.Random(4)

    async def caller(http: httpx.AsyncClient, ends: Counter[str], count: int) -> None:
        for _ in range(count):
            prompt = [rng.randrange(5, 15)] * rng.randrange(1, 120)
            tokens, act = rng.randrange(1, 60), rng.random()
            if act < 0.25:
                try:
                    async with asyncio.timeout(rng.random() * 0.05):
                        await _stream(http, prompt, 120)
                except TimeoutError:
                    ends["left"] += 1
            elif act < 0.6:
                ends[await _stream(http, prompt, tokens)] += 1
            else:
                ends[await _plain(http, prompt, tokens)] += 1

    async def killer() -> None:
        for rank in (0, 1):
            await asyncio.sleep(0.3)
            os.kill(await asyncio.to_thread(serving.engine, rank), signal.SIGKILL)
            await asyncio.to_thread(until, lambda: not serving.well(), "nobody noticed")
            await asyncio.to_thread(until, serving.well, "it did not come back")

    async def main() -> Counter[str]:
        ends: Counter[str] = Counter()
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=serving.url, timeout=300, limits=limits) as http:
            await asyncio.gather(*(caller(http, ends, 12) for _ in range(12)), killer())
        return ends

    ends = asyncio.run(main())
    # Both replicas may seem dead to a server process that has not reached the first one again.
    assert set(ends) <= {
        "done", "left", "replica_died", "engine_stalled", "engine_restarting", "overloaded",
    }, ends  # fmt: skip
    assert ends["done"] > 60
    until(lambda: serving.get("/load").json() == {"server_load": 0}, "requests are left")
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        until(lambda n=name: set(serving.samples(n).values()) == {0.0}, f"{name} is not 0")


@pytest.fixture
def parallel(tiny_folder: Path, tmp_path: Path) -> Iterator[Serving]:
    """One engine, whose layers two ranks share."""
    port, _ = free_ports()
    log = tmp_path / "server.log"
    command = [*flags(tiny_folder), "-tp", "2", "--port", str(port)]
    command += ["--engine-heartbeat-timeout", "600"]
    server = Serving(launched(log, *command), f"http://127.0.0.1:{port}", log)
    try:
        until(lambda: server.status() == 200, "it did not start")
        yield server
    finally:
        for pid in (*family(server.process.pid)[1:], server.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        server.process.wait()
        print(log.read_text()[-3000:])


@pytest.mark.exhaustive
def test_a_stopped_rank_is_told_and_a_killed_engine_leaves_nothing(
    parallel: Serving, tmp_path: Path
) -> None:
    """The heartbeat's timeout alone would tell after ten minutes here."""
    pids = family(parallel.process.pid)
    workers = [pid for pid in pids if "worker_process" in command_of(pid)]
    assert len(workers) == 2
    memory = set(os.listdir("/dev/shm"))
    os.kill(workers[1], signal.SIGSTOP)
    print("stopped rank:", until(lambda: parallel.status() == 503, "/health did not tell", SOON))
    os.kill(workers[1], signal.SIGCONT)
    until(lambda: parallel.status() == 200, "it did not recover")
    os.kill(parallel.engine(0), signal.SIGKILL)
    print("dead engine:", until(lambda: parallel.status() != 200, "/health did not tell", SOON))
    assert parallel.process.wait(300) == 1
    until(lambda: not any(map(alive, pids)), "processes were left behind")
    assert set(os.listdir("/dev/shm")) <= memory
    until(
        lambda: [path.name for path in tmp_path.iterdir()] == ["server.log"],
        "files were left behind",
    )


@pytest.mark.exhaustive
def test_a_replica_that_stands_still_is_left_out_until_it_answers(
    tiny_folder: Path, tmp_path: Path
) -> None:
    async def ask_one(llm: AsyncLLM, name: str, tokens: int) -> tuple[str | None, int]:
        params = SamplingParams(
            max_tokens=tokens, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY
        )
        async for output in llm.generate([5, 6, len(name)], params, name):
            last = output
        return last.outputs[0].finish_reason, len(last.outputs[0].token_ids)

    async def becomes(llm: AsyncLLM, *states: str) -> None:
        async with asyncio.timeout(300):
            while [replica.status for replica in llm.replicas] != list(states):
                await asyncio.sleep(0.02)

    async def main() -> None:
        llm = await asyncio.to_thread(
            AsyncLLM, str(tiny_folder), data_parallel_size=2, cpu_threads=1, max_model_len=256,
            num_gpu_blocks_override=64, engine_heartbeat_timeout=2.0,
            watchdog_config={"check_interval": 0.05, "dump_stacks": False},
            kv_events_config={
                "enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events",
                "replay_endpoint": f"ipc://{tmp_path}/replay",
            },
        )  # fmt: skip
        try:
            client = llm._core._replicas[0].client
            requests = [asyncio.ensure_future(ask_one(llm, "n" * n, 200)) for n in range(1, 7)]
            while not llm._core.router.loads[0]:
                await asyncio.sleep(0)
            os.kill(client._owned.pid, signal.SIGSTOP)
            await becomes(llm, "stalled", "ok")
            await llm.check_health()
            assert await asyncio.gather(*requests) == [("length", 200)] * 6
            assert await ask_one(llm, "meanwhile", 3) == ("length", 3)
            os.kill(client._owned.pid, signal.SIGCONT)
            await becomes(llm, "ok", "ok")
            ends = await asyncio.gather(*(ask_one(llm, f"then{n}", 5) for n in range(8)))
            assert ends == [("length", 5)] * 8
            assert list(llm._core.router.loads) == [0, 0]
            await follow_events(llm)
        finally:
            await asyncio.to_thread(llm.shutdown)

    async def follow_events(llm: AsyncLLM) -> None:
        """The router knows what replicas have cached, beside its own estimates."""
        blocks = llm._core.router.blocks
        async with asyncio.timeout(300):
            while not len(blocks):
                await asyncio.sleep(0.02)
            await llm.reset_prefix_cache()
            while len(blocks):
                await asyncio.sleep(0.02)
        assert [blocks.is_exact(index) for index in range(2)] == [True, True]

    asyncio.run(main())
