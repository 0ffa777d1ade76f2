"""Engines that stand still: stopped processes, steps that do not end (reference cases F16, F19)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from modulm import AsyncLLM, SamplingParams
from modulm.errors import EngineStalled
from modulm_server.engine.heartbeat import StepWatch

CHAT = "/v1/chat/completions"
#: A step of a request with `extra_args` does not end before a file is there.
HANGING = """
import time
from pathlib import Path
from modulm.contracts.sampling import LogitsProcessor

class Hanging(LogitsProcessor):
    keeps_argmax = False

    def admit(self, row):
        return "until" in (row.params.extra_args or {})

    def apply_row(self, row, logits):
        while not Path(row.params.extra_args["until"]).exists():
            time.sleep(0.01)
        return logits
"""
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@asynccontextmanager
async def engine(folder: Path, **flags: Any) -> AsyncIterator[AsyncLLM]:
    keywords = {"cpu_threads": 1, "max_model_len": 256, "engine_heartbeat_timeout": 2.0, **flags}
    llm = await asyncio.to_thread(AsyncLLM, str(folder), **keywords)
    try:
        yield llm
    finally:
        await asyncio.to_thread(llm.shutdown)


async def ask(llm: AsyncLLM, name: str, params: SamplingParams = PARAMS) -> list[int]:
    async for output in llm.generate([5, 6, 7], params, name):
        last = output
    return list(last.outputs[0].token_ids)


async def stalled(llm: AsyncLLM) -> bool:
    try:
        await llm.check_health()
    except EngineStalled:
        return True
    return False


async def until(condition: Callable[[], Any], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < end, "it did not become true"
        await asyncio.sleep(0.02)


def _tell(folder: Path) -> bool:
    """Whether stacks of a step that hangs lie there."""
    return any("in apply_row" in file.read_text() for file in folder.glob("*"))


@pytest.mark.parametrize("inside", [False, True], ids=["process", "thread"])
def test_a_step_that_does_not_end(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    (tmp_path / "hanging_step.py").write_text(HANGING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "go on"
    hanging = PARAMS.with_(extra_args={"until": str(file)})

    async def main() -> None:
        async with engine(
            tiny_folder,
            disable_frontend_multiprocessing=inside,
            logits_processors=("hanging_step:Hanging",),
            watchdog_config={"dump_dir": str(tmp_path / "stacks"), "check_interval": 0.05},
        ) as llm:
            before = await ask(llm, "before")
            requests = [ask(llm, "hangs", hanging), ask(llm, "waits")]
            ends = await asyncio.gather(*requests, return_exceptions=True)
            assert [type(end) for end in ends] == [EngineStalled] * 2
            assert await stalled(llm)
            # What computes beside it in its process, as this test may, looks like work of the step.
            with pytest.raises(EngineStalled, match="a step has (done nothing|not ended) for"):
                await ask(llm, "refused")
            assert await llm.reports() == []
            # Stacks are asked for beside, and may come later than the errors.
            stacks = tmp_path / "stacks"
            await until(lambda: asyncio.to_thread(_tell, stacks))
            file.touch()

            async def answers() -> bool:
                return not await stalled(llm)

            await until(answers)
            assert await ask(llm, "after") == before
            assert llm.active == 0

    asyncio.run(main())
    (stacks,) = (tmp_path / "stacks").iterdir()
    assert "in apply_row" in stacks.read_text()
    sys.modules.pop("hanging_step", None)


def test_a_stopped_process(tiny_folder: Path) -> None:
    """Nobody waits for it, not to hand requests in either; it goes on when it goes on."""

    async def main() -> None:
        async with engine(tiny_folder, max_num_queued_reqs=1000) as llm:
            before = await ask(llm, "before")
            pid = llm._core._owned.pid  # type: ignore[attr-defined]
            os.kill(pid, signal.SIGSTOP)
            try:
                long = [7] * 240
                requests = [ask(llm, str(number)) for number in range(3)]
                many = [llm.generate(long, PARAMS, f"long-{n}").__anext__() for n in range(400)]
                ends = await asyncio.gather(*requests, *many, return_exceptions=True)
                assert {type(end) for end in ends} == {EngineStalled}
                assert await stalled(llm)
            finally:
                os.kill(pid, signal.SIGCONT)

            async def answers() -> bool:
                return not await stalled(llm)

            await until(answers)
            assert await ask(llm, "after") == before

    asyncio.run(main())


@pytest.mark.exhaustive
@pytest.mark.usefixtures("own_interpreters")
def test_f16_a_server_whose_engine_is_stopped(tiny_folder: Path, tmp_path: Path) -> None:
    """503, an error for who waits, metrics, and in the end an exit that is not 0 (case F19)."""
    log, path = tmp_path / "log", str(tmp_path / "socket")
    with log.open("wb") as sink:
        server = subprocess.Popen(
            [
                sys.executable, "-m", "modulm.cli.main", "serve", str(tiny_folder), "--uds", path,
                "--max-model-len", "256", "--engine-heartbeat-timeout", "2",
                "--watchdog-config", '{"timeout": 2}',
            ],
            stdout=sink, stderr=sink, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    transport = httpx.HTTPTransport(uds=path)
    client = httpx.Client(transport=transport, base_url="http://localhost", timeout=300)
    try:
        wait_for(server, client, log)
        pid = engine_of(server.pid)
        messages = [{"role": "user", "content": "hi"}]
        body = {"messages": messages, "stream": True, "ignore_eos": True, "max_tokens": 240}
        with client.stream("POST", CHAT, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(pid, signal.SIGSTOP)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["error"]["code"] == "engine_stalled"
        for path in ("/health", "/ready"):
            assert client.get(path).status_code == 503
        refused = client.post(CHAT, json={"messages": messages})
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "the engine does not respond"
        assert client.get("/metrics").status_code == 200
        assert server.wait(300) == 1
    finally:
        client.close()
        server.kill()
        server.wait()
    assert "the engine does not respond: nothing was heard of its process" in log.read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def wait_for(server: subprocess.Popen[bytes], client: httpx.Client, log: Path) -> None:
    end = time.monotonic() + 300
    while True:
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)


def engine_of(server: int) -> int:
    """The process that a server has started."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            after = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(after[1]) == server:
            return int(entry.parent.name)
    pytest.fail("there is no process of the engine")


class Machine:
    """A loop and two clocks, as a watch reads them."""

    def __init__(self, tokens: int, step: int, timeout: float = 10.0, cold: float = 0.0) -> None:
        self.now = self.cpu = 0.0
        plan = SimpleNamespace(step=step, counts=np.array([tokens]))
        self.loop: Any = SimpleNamespace(busy_since=None, plan=plan)
        self.watch = StepWatch(
            self.loop, timeout, cold, clock=lambda: self.now, spent=lambda: self.cpu
        )

    def found_after(self, cores: float) -> float | None:
        """Seconds of a step that uses so many cores until the engine is taken not to work."""
        self.loop.busy_since = self.now
        for _ in range(1000):
            self.now += 1.0
            self.cpu += cores
            if self.watch.look() is not None:
                return self.now - self.loop.busy_since
        return None


def test_what_a_step_may_take() -> None:
    """One that waits gets the timeout, one that computes more, by its tokens."""
    assert Machine(tokens=1, step=9).found_after(cores=0.0) == 11
    assert Machine(tokens=2000, step=9).found_after(cores=0.1) == 11
    assert Machine(tokens=2000, step=9).found_after(cores=1.0) == 511
    assert Machine(tokens=4, step=9).found_after(cores=2.0) == 12
    assert Machine(tokens=4, step=1, cold=120).found_after(cores=1.0) == 132
    assert Machine(tokens=4, step=4, cold=120).found_after(cores=1.0) == 12
    assert Machine(tokens=1, step=9, timeout=0).found_after(cores=0.0) is None


def test_a_step_that_ends_is_forgotten() -> None:
    machine = Machine(tokens=1, step=9)
    assert machine.found_after(cores=0.0) == 11
    machine.loop.busy_since = None
    machine.now += 1
    assert machine.watch.look() is None
    assert machine.found_after(cores=0.0) == 11
