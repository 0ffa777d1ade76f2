"""Adapters come, go and change beside requests: real loop and scheduler, no model.

The test's thread is the engine's, so that steps can be counted.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modulm.contracts.executor import Plan, StepResult
from modulm.contracts.requests import Request
from modulm.contracts.sampling import SamplingParams
from modulm.engine.scheduling.limits import Limits
from modulm.errors import CheckpointError, EngineError, NotFound, RequestError, UnsupportedError
from modulm.testing.engines import check_empty, make_engine
from modulm.testing.fakes import FakeExecutor, FakeFault, Group
from modulm_server.engine.adapters import _READERS, Adapter, AdapterRegistry

CHAIN = 8


class Reading(FakeExecutor):
    """Reads adapters when the gate of their name is open; steps need those that rows begin with."""

    def __init__(self, **more: Any) -> None:
        super().__init__((Group(4, 200),), adapters=2, **more)
        self.held: dict[str, str] = {}
        self.reads: list[str] = []
        self.shut: dict[str, threading.Event] = {}

    def add_adapter(self, name: str, path: Path) -> None:
        self._pass(name)
        text = (path / "weights").read_text()
        if text == "bad":
            raise CheckpointError(f"{path}: rank 99 is more than 16")
        self.held[name] = text

    def prepare_adapter(self, name: str) -> None:
        self._pass(name)
        if name not in self.held:
            raise EngineError(f"no adapter {name!r}")

    def _pass(self, name: str) -> None:
        self.reads.append(name)
        gate = self.shut.get(name.partition("@")[0])
        if gate is not None:
            gate.wait()

    def remove_adapter(self, name: str) -> None:
        del self.held[name]

    def run(self, plan: Plan) -> StepResult:
        for start in plan.admit:
            adapter = start.parts.get("adapters")
            if adapter is not None and adapter.name not in self.held:
                raise FakeFault(f"row {start.row} begins with {adapter.name}, which was not read")
        return super().run(plan)


class Setting:
    """A registry on an engine, and what the tests do with both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.executor = Reading()
        self.loop, self.seen = make_engine(self.executor, Limits(rows=6, tokens=64))
        self.slots = 2
        core: Any = SimpleNamespace(
            info=SimpleNamespace(limit=lambda part, name: self.slots, models=("M",)),
            executor=self.executor,
            loop=self.loop, submit=self.loop.submit, sleep=lambda level: None,
        )  # fmt: skip
        self.listed: list[tuple[str, ...]] = []
        self.registry = AdapterRegistry(
            core, self.seen.events, lambda now: self.listed.append(tuple(a.name for a in now))
        )
        self.core = core

    def write(self, name: str, text: str = "good", **config: Any) -> Path:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "weights").write_text(text)
        (folder / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], **config})
        )
        return folder

    def load(self, name: str, text: str = "good", replace: bool = False, **config: Any) -> None:
        adapter = Adapter(name, str(self.write(name, text, **config)))
        self.registry.load(adapter, replace).result(300)

    def ask(self, name: str, adapter: str | None, prompt: Any = (9,), tokens: int = 4) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens)
        self.registry.submit([Request(id=name, prompt=prompt, params=params, adapter=adapter)])

    def handed_in(self, request: str) -> None:
        """Wait until the engine has a request, or it has ended."""
        for _ in range(30_000):
            waiting = {getattr(item, "id", None) for item in tuple(self.loop._inbox._items)}
            if request in {*waiting, *self.loop.scheduler._entries, *self.seen.finished}:
                return
            threading.Event().wait(0.002)
        raise AssertionError(f"{request} did not come")

    def run(self) -> None:
        while self.loop.tick():
            for events in self.seen.steps[-1:]:
                self.registry.release(events.finished)

    def answer(self, name: str, adapter: str | None, prompt: Any = (9,), tokens: int = 4) -> None:
        self.ask(name, adapter, prompt, tokens)
        self.handed_in(name)
        self.run()

    def settled(self) -> None:
        """Everything that readers were given is done: all of them are here at once."""
        together = threading.Barrier(_READERS)
        wait([self.registry._readers.submit(together.wait, 10) for _ in range(_READERS)], 10)


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    environment = Setting(tmp_path)
    yield environment
    for gate in environment.executor.shut.values():
        gate.set()
    environment.registry.close()
    environment.executor.stop()


def test_reading_one_takes_no_step_from_anybody(setting: Setting) -> None:
    setting.load("old")
    streams = ("plain", "adapted", "other")
    for name, adapter in zip(streams, (None, "old", None), strict=True):
        setting.ask(name, adapter, tokens=60)
        setting.handed_in(name)
        setting.loop.tick()
    gate = setting.executor.shut["new"] = threading.Event()
    loading = setting.registry.load(Adapter("new", str(setting.write("new"))))
    setting.load("third")
    setting.write("waits")
    gate_of_old = setting.executor.shut["old"] = threading.Event()
    setting.ask("waiting", "old")
    tokens = setting.seen.tokens
    for _ in range(40):
        before = {name: len(tokens[name]) for name in streams}
        assert setting.loop.tick()
        assert {name: len(tokens[name]) - 1 for name in streams} == before
    assert not loading.done()
    assert "waiting" not in tokens
    gate.set()
    loading.result(300)
    gate_of_old.set()
    setting.handed_in("waiting")
    setting.answer("late", "new")
    assert len(tokens["late"]) == len(tokens["waiting"]) == 4


def test_what_is_unloaded_while_in_use_is_kept_until_the_last_one_ends(setting: Setting) -> None:
    setting.load("a")
    for name in ("one", "two"):
        setting.ask(name, "a", tokens=10 if name == "one" else 20)
        setting.handed_in(name)
        setting.loop.tick()
    setting.registry.unload("a").result(300)
    with pytest.raises(NotFound, match="'a'"):
        setting.ask("three", "a")
    setting.settled()
    assert setting.executor.held
    while "one" not in setting.seen.finished:
        setting.loop.tick()
        setting.registry.release(setting.seen.steps[-1].finished)
    setting.settled()
    assert setting.executor.held
    setting.run()
    setting.settled()
    assert not setting.executor.held
    assert {end.reason for end in setting.seen.finished.values()} == {"length"}
    assert setting.listed == [("a",), ()]
    with pytest.raises(NotFound, match="'a'"):
        setting.registry.unload("a").result(300)
    check_empty(setting.loop)


def test_loaded_anew_it_shares_no_block_with_what_it_was(setting: Setting) -> None:
    prompt = [9] * 13
    setting.load("a")
    setting.load("b")
    for name, adapter in (("a1", "a"), ("b1", "b"), ("base", None), ("a2", "a")):
        setting.answer(name, adapter, prompt)
    setting.load("a", replace=True, text="better")
    setting.answer("a3", "a", prompt)
    setting.answer("a4", "a", prompt)
    setting.answer("b2", "b", prompt)
    assert setting.seen.cached == {
        "a1": 0, "b1": 0, "base": 0, "a2": 12, "a3": 0, "a4": 12, "b2": 12
    }  # fmt: skip
    setting.settled()
    assert sorted(setting.executor.held.values()) == ["better", "good"]


def test_requests_keep_what_they_came_with(setting: Setting) -> None:
    setting.load("a")
    setting.ask("first", "a", tokens=20)
    setting.handed_in("first")
    setting.loop.tick()
    setting.load("a", replace=True, text="better")
    setting.ask("second", "a", tokens=5)
    setting.handed_in("second")
    setting.loop.tick()
    keys = {
        row.start.request: row.start.parts["adapters"].name
        for row in setting.executor.rows.values()
    }
    assert setting.executor.held[str(keys["first"])] == "good"
    assert setting.executor.held[str(keys["second"])] == "better"
    setting.run()
    setting.settled()
    assert list(setting.executor.held.values()) == ["better"]


def test_files_that_did_not_change_are_the_same_version(setting: Setting) -> None:
    adapter = Adapter("a", str(setting.write("a")))
    setting.registry.load(adapter).result(300)
    setting.answer("one", "a", [9] * 9)
    setting.registry.load(adapter, replace=True).result(300)
    setting.answer("two", "a", [9] * 9)
    setting.registry.unload("a").result(300)
    setting.registry.load(adapter).result(300)
    setting.answer("three", "a", [9] * 9)
    assert setting.seen.cached == {"one": 0, "two": 8, "three": 8}
    setting.settled()
    assert len(setting.executor.held) == 1


@pytest.mark.parametrize("wrong", ["files", "config", "folder"])
def test_a_bad_one_is_named_with_its_reason_and_hurts_nobody(setting: Setting, wrong: str) -> None:
    setting.load("good")
    folder = setting.write("rotten", "bad" if wrong == "files" else "good")
    if wrong == "config":
        (folder / "adapter_config.json").unlink()
    path = str(folder) if wrong != "folder" else str(folder / "nowhere")
    why = {"files": "rank 99", "config": "adapter_config", "folder": "No such file"}[wrong]
    with pytest.raises(
        RequestError, match=rf"adapter 'rotten' cannot be loaded: .*{why}"
    ) as caught:
        setting.registry.load(Adapter("rotten", path)).result(300)
    assert caught.value.param == "lora_path"
    with pytest.raises(RequestError, match="'good' cannot be loaded"):
        setting.registry.load(Adapter("good", path), replace=True).result(300)
    setting.answer("one", "good")
    assert setting.seen.finished["one"].reason == "length"
    assert [adapter.name for adapter in setting.registry.adapters] == ["good"]
    setting.settled()
    assert list(setting.executor.held.values()) == ["good"]


def test_files_that_cannot_be_read_again_end_the_requests_that_name_them(setting: Setting) -> None:
    setting.load("a")
    (key,) = setting.executor.held
    setting.core.sleep(2)
    setting.registry.sleep(2)
    setting.executor.held.clear()
    setting.answer("awake", "a")
    assert setting.executor.held == {key: "good"}
    setting.registry.sleep(2)
    (setting.folder / "a/weights").write_text("bad")
    setting.answer("gone", "a")
    error = setting.seen.finished["gone"].error
    assert isinstance(error, RequestError)
    assert "adapter 'a' cannot be loaded" in str(error)
    setting.answer("base", None)
    assert setting.seen.finished["base"].reason == "length"
    assert not setting.registry._using


def test_names_that_are_taken(setting: Setting) -> None:
    setting.load("a")
    gate = setting.executor.shut["slow"] = threading.Event()
    slow = Adapter("slow", str(setting.write("slow")))
    first: Future[None] = setting.registry.load(slow)
    for name, why in (("a", "already loaded"), ("M", "the model itself"), ("slow", "being loaded")):
        with pytest.raises(RequestError, match=why):
            setting.registry.load(Adapter(name, str(setting.folder / "a"))).result(300)
    assert setting.registry.load(slow) is first, "who asks for the same waits for the same"
    gate.set()
    first.result(300)
    assert setting.executor.reads.count(next(k for k in setting.executor.held if "slow" in k)) == 1
    setting.slots = 0
    with pytest.raises(UnsupportedError, match="--enable-lora"):
        setting.registry.load(Adapter("more", "x")).result(300)


def test_aborted_while_it_waits_for_its_adapter(setting: Setting) -> None:
    setting.load("a")
    gate = setting.executor.shut["a"] = threading.Event()
    setting.ask("left", "a")
    setting.registry.forget("left")
    setting.loop.abort("left")
    gate.set()
    setting.settled()
    setting.run()
    assert not setting.seen.tokens
    assert not setting.registry._using
    check_empty(setting.loop)


def test_before_its_invocation_a_prompt_is_the_models_own(setting: Setting) -> None:
    """aLoRA: blocks before the activation are shared with the base model's, both ways."""
    setting.load("checks", alora_invocation_tokens=[7, 8])
    text, call = [9] * CHAIN, [7, 8, 5, 5, 5]
    setting.answer("base", None, [*text, 5])
    setting.answer("called", "checks", [*text, *call])
    setting.answer("called again", "checks", [*text, *call, 5])
    setting.answer("plain", None, [*text, *call])
    setting.answer("not called", "checks", [*text, 7, 5, 5, 5, 5])
    setting.answer("called late", "checks", [*text, *call, 6, 6, 7, 8, 4])
    assert setting.seen.cached == {
        "base": 0, "called": 8, "called again": 12, "plain": 8, "not called": 8, "called late": 12
    }  # fmt: skip
