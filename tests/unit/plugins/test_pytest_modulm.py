"""The fixtures that `pytest-modulm` gives to authors of plugins."""

from __future__ import annotations

import threading
import time

import httpx
import numpy as np
import pytest
from _pytest.outcomes import Failed, Skipped

from modulm.contracts.sampling import LogitsProcessor
from modulm.errors import PluginBroken, PluginIncompatible
from modulm.plugins import PluginManager
from modulm.plugins.declaration import Declaration
from modulm.plugins.kinds import find_kind
from modulm.plugins.manager import check_driver
from pytest_modulm import Faults, Installation, KitRunner
from pytest_modulm.faults import InjectedError


class Driver:
    def value(self, number: int) -> np.ndarray:
        return np.full((2, number), number)

    @classmethod
    def names(cls) -> list[str]:
        return ["a", "b"]

    @staticmethod
    def twice(number: int) -> int:
        return 2 * number


class Silent(LogitsProcessor):
    api = 1

    def admit(self, view):
        return False

    def apply_row(self, view, logits):
        return logits


@pytest.mark.exhaustive
def test_a_tiny_server_answers(modulm_client: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}
    answer = modulm_client.post("/v1/completions", json=body)
    assert answer.json()["usage"]["completion_tokens"] == 4


@pytest.mark.exhaustive
def test_a_tiny_engine_generates(modulm_engine) -> None:
    (output,) = modulm_engine.generate(["hello"])
    assert output.outputs[0].token_ids


def test_a_method_raises_from_some_call_on(modulm_faults: Faults) -> None:
    modulm_faults.raising(Driver, "value", after=1)
    modulm_faults.raising(Driver, "twice", KeyError("mine"))
    driver = Driver()
    assert driver.value(3).shape == (2, 3)
    with pytest.raises(InjectedError, match="value was made to fail"):
        driver.value(3)
    with pytest.raises(KeyError, match="mine"):
        Driver.twice(1)
    assert modulm_faults.calls == {"value": 1, "twice": 1}


def test_faults_end_with_the_test_that_made_them() -> None:
    assert Driver().value(3).shape == (2, 3)
    assert Driver.twice(1) == 2


def test_a_method_hangs_until_the_test_ends(modulm_faults: Faults) -> None:
    modulm_faults.hanging(Driver, "value")
    errors: list[BaseException] = []

    def call() -> None:
        try:
            Driver().value(1)
        except InjectedError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    while not modulm_faults.calls:
        time.sleep(0.001)
    assert thread.is_alive()
    modulm_faults.end()
    thread.join()
    assert "value was made to hang" in str(errors[0])


def test_wrong_shapes_and_versions(modulm_faults: Faults, driver: str) -> None:
    modulm_faults.wrong_shape(Driver, "value")
    modulm_faults.wrong_shape(Driver, "names")
    assert Driver().value(3).shape == (2, 2)
    assert Driver.names() == ["a"]
    namespace: dict[str, type] = {}
    exec("\n".join(line[4:] for line in driver.splitlines()), namespace)
    future = modulm_faults.wrong_version(namespace["Shortest"])
    with pytest.raises(PluginIncompatible, match="version 1000000"):
        check_driver(Declaration("x", "x:X", kind="schedulers"), future, find_kind("schedulers"))


def test_broken_imports_are_installed(modulm_faults: Faults) -> None:
    assert modulm_faults.failing_import("schedulers", "bad") == "modulm-fault-bad"
    modulm_faults.slow_import("hooks", "slow", 0.0)
    manager = PluginManager()
    with pytest.raises(PluginBroken, match="the import was made to fail"):
        manager.load("schedulers", "bad")
    manager.load_hooks()
    assert "slow" not in manager.problems


def test_a_kit_fails_a_test_also_where_it_tried_nothing(modulm_kit: KitRunner) -> None:
    assert modulm_kit.installed("schedulers", "fcfs") == ""
    with pytest.raises(AssertionError):
        modulm_kit("commands", Driver)
    with pytest.raises(Failed, match="kit of logits_processors tried nothing: .* accepts no row"):
        modulm_kit("logits_processors", Silent)
    with pytest.raises(Skipped, match="was not run"):
        modulm_kit("logits_processors", Silent, may_be_left_out=True)


def test_installed_modules_are_forgotten(tmp_path, monkeypatch) -> None:
    import sys

    monkeypatch.syspath_prepend(str(tmp_path))
    installation = Installation(tmp_path)
    installation("modulm-a", {}, {"mod_forget": "X = 1"})
    __import__("mod_forget")
    installation.forget()
    assert "mod_forget" not in sys.modules
