"""Every key of `--watchdog-config`, on an engine that says of itself whether it works."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field

from modulm.config import EngineConfig
from modulm.contracts.engine_info import EngineInfo
from modulm.contracts.sampling import SamplingParams
from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import EngineDead, EngineStalled
from modulm_server.engine import async_llm
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.engine.heartbeat import interval_of, stacks_file
from modulm_server.engine.watchdog import Watchdog
from modulm_server.scripted import scripted_info
from modulm_weight_transfer.engine import WeightState


@define(eq=False, slots=False)
class Core:
    """A core client whose engine stands still while `stuck` says so."""

    info: EngineInfo
    own: bool = True
    stuck: str | None = None
    did: list[str] = field(factory=list)
    address: None = None
    number: int = 0
    ranks: tuple[int, ...] = ()
    down: None = None
    report: Any = None
    weights: WeightState = field(factory=WeightState)

    def tokenizer(self) -> None:
        return None

    def trouble(self) -> str | None:
        return self.stuck

    def forget_silence(self) -> None:
        self.did.append("forget")

    def dump_stacks(self) -> None:
        self.did.append("stacks")

    def give_up(self, error: EngineStalled) -> None:
        self.did.append("give up")

    def kill(self) -> bool:
        self.did.append("kill")
        return self.own

    def submit(self, requests: Any) -> None:
        self.did.append("submit")

    def abort(self, request: str) -> None:
        self.did.append("abort")

    def close(self) -> None:
        self.did.append("close")


def core_of(tokenizer: Tokenizer, **keys: Any) -> Core:
    config = EngineConfig.from_keywords(
        model="M", skip_tokenizer_init=True, engine_heartbeat_timeout=3600.0, watchdog_config=keys
    )
    return Core(scripted_info(tokenizer, config=config))


class Told:
    """What a watchdog has said, looked at second by second."""

    def __init__(self, core: Core) -> None:
        self.changes: list[EngineStalled | None] = []
        self.deaths: list[EngineDead] = []
        self.dog = Watchdog(core, self.changes.append, self.deaths.append)  # type: ignore[arg-type]
        self.dog.stop()

    def look(self, *seconds: float) -> None:
        for second in seconds:
            self.dog._look(second)


@pytest.mark.parametrize("dumps", [True, False])
def test_dump_stacks(tokenizer: Tokenizer, dumps: bool) -> None:
    core = core_of(tokenizer, dump_stacks=dumps)
    watchdog = Told(core)
    watchdog.look(0.0)
    core.stuck = "a step has done nothing for 11 s"
    watchdog.look(1.0, 2.0, 3.0)
    assert core.did == ["stacks"] * dumps
    assert [str(change) for change in watchdog.changes] == [
        "the engine does not respond: a step has done nothing for 11 s"
    ]
    core.stuck = None
    watchdog.look(4.0, 5.0)
    assert watchdog.changes[1:] == [None]


@pytest.mark.parametrize("action", ["report", "abort", "exit"])
def test_action_and_timeout(tokenizer: Tokenizer, action: str) -> None:
    """Only `exit` gives the engine up, once it has stood still for `timeout`."""
    core = core_of(tokenizer, action=action, timeout=30, dump_stacks=False)
    core.stuck = "nothing was heard of its process"
    watchdog = Told(core)
    watchdog.look(0.0, 29.9)
    assert (core.did, watchdog.deaths) == ([], [])
    watchdog.look(30.0)
    assert core.did == (["kill"] if action == "exit" else [])
    assert len(watchdog.deaths) == (action == "exit")


def test_a_front_end_that_does_not_own_the_engine_does_not_end_with_it(
    tokenizer: Tokenizer,
) -> None:
    core = core_of(tokenizer, timeout=0)
    core.own, core.stuck = False, "it stands still"
    watchdog = Told(core)
    watchdog.look(0.0, 0.0)
    assert watchdog.deaths == []


@pytest.mark.parametrize(("action", "waits"), [("report", True), ("abort", False), ("exit", False)])
def test_action_says_whether_waiting_requests_end(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, action: str, waits: bool
) -> None:
    core = core_of(tokenizer, action=action)
    monkeypatch.setattr(async_llm, "ThreadCoreClient", lambda *_: core)
    llm = AsyncLLM.from_config(core.info.config.with_(disable_frontend_multiprocessing=True))

    async def main() -> bool:
        task = asyncio.ensure_future(anext(llm.generate([5, 6], SamplingParams(max_tokens=4), "a")))
        while "submit" not in core.did and not task.done():
            await asyncio.sleep(0)
        await asyncio.to_thread(llm._post_stall, EngineStalled("it stands still"))
        with pytest.raises(EngineStalled):
            await llm.check_health()
        for _ in range(20):
            await asyncio.sleep(0)
        if task.done():
            assert isinstance(task.exception(), EngineStalled)
            return False
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return True

    assert asyncio.run(main()) == waits
    assert ("give up" in core.did) != waits
    llm.shutdown()


def test_check_interval(tokenizer: Tokenizer) -> None:
    """Its own, or a fifth of the timeout of the heartbeat and a second at most."""
    assert interval_of(core_of(tokenizer, check_interval=0.25).info.config) == 0.25
    assert interval_of(core_of(tokenizer).info.config) == 1.0
    looked = threading.Event()
    core = core_of(tokenizer, check_interval=0.01)
    core.trouble = looked.set  # type: ignore[assignment, method-assign]
    dog = Watchdog(core, lambda _: None, lambda _: None)  # type: ignore[arg-type]
    assert looked.wait(300)
    dog.stop()


def test_dump_dir(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is made; none, or vLLM's default of an empty one, is the log."""
    monkeypatch.chdir(tmp_path)
    for nowhere in (None, ""):
        assert stacks_file(core_of(tokenizer, dump_dir=nowhere).info.config) is sys.stderr
    assert list(tmp_path.iterdir()) == []
    folder = tmp_path / "new" / "stacks"
    with stacks_file(core_of(tokenizer, dump_dir=str(folder)).info.config) as file:
        file.write("x")
    assert [path.read_text() for path in folder.iterdir()] == ["x"]
