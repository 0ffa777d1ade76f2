"""Run-time registration, worker processes, and drivers' options."""

from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys

import pytest
from attrs import frozen

import modulm
from modulm.config.environ import isolated
from modulm.contracts.policy import Policy
from modulm.errors import ConfigError, PluginBroken, PluginConflict, PluginError, PluginNotFound
from modulm.plugins import Declaration, PluginManager, hookimpl, register
from modulm.plugins.files import load_file
from modulm.plugins.manager import configure, current, using
from modulm_wire import frames


class Last(Policy):
    """A policy with options."""

    name = "last"
    api = 1

    @frozen
    class Config:
        @frozen
        class Inner:
            depth: int = 1

        blocks: int
        share: float = 0.5
        on: bool = False
        inner: Inner = Inner()

    def key(self, request):
        return -request.arrival

    def victim(self, running):
        return 0


def test_object_and_path():
    manager = PluginManager()
    manager.register("schedulers", "object", Last)
    manager.register("schedulers", "path", "modulm.contracts.policy:Policy")
    assert manager.load("schedulers", "object") is Last
    assert {d.origin for d in manager.names("schedulers") if d.name == "path"} == {"registered"}


def test_registered_stands_in_for_installed(install, driver):
    install("modulm-a", {"modulm.schedulers": {"shortest": "mod_a:Shortest"}}, {"mod_a": driver})
    manager = PluginManager()
    manager.register("schedulers", "shortest", Last)
    assert manager.load("schedulers", "shortest") is Last


def test_registering_twice():
    manager = PluginManager()
    manager.register("schedulers", "last", Last)
    manager.register("schedulers", "last", Last)
    assert [d.name for d in manager.names("schedulers")].count("last") == 1
    with pytest.raises(PluginConflict, match="already registered"):
        manager.register("schedulers", "last", "a.b:C")


CELL = """
from modulm.contracts.policy import Policy
from modulm.plugins import hookimpl

class Shortest(Policy):
    name = "shortest"
    api = 1
    def key(self, request): return request.prompt_len
    def victim(self, running): return 0

class Watcher:
    @hookimpl
    def modulm_report_header(self, config): return ["watched"]

manager.register("schedulers", "shortest", Shortest)
manager.add(Watcher())
"""


def test_a_notebook_cell_that_runs_again_takes_the_place_of_the_first():
    manager = PluginManager()
    for _ in range(2):
        cell = {"manager": manager, "__name__": "__main__"}
        exec(CELL, cell)
    assert manager.load("schedulers", "shortest") is cell["Shortest"]
    lines = manager.gather("modulm_report_header", config=None)
    assert lines.count("watched") == 1


def test_unregister():
    manager = PluginManager()
    manager.register("schedulers", "fcfs", Last)
    assert manager.load("schedulers", "fcfs") is Last
    manager.unregister("schedulers", "fcfs")
    assert manager.find("schedulers", "fcfs").distribution == "modulm-scheduler-fcfs"
    with pytest.raises(PluginNotFound, match="no schedulers 'fcfs' was registered at run time"):
        manager.unregister("schedulers", "fcfs")


def test_unregister_a_hook_plugin_and_what_it_declared():
    class Offers:
        @hookimpl
        def modulm_platforms(self):
            return [Declaration("chip", "no_such:Chip")]

    manager = PluginManager()
    manager.add(Offers(), "offers")
    assert "chip" in {d.name for d in manager.names("platforms")}
    manager.unregister("hooks", "offers")
    assert "chip" not in {d.name for d in manager.names("platforms")}
    assert manager.hook.modulm_platforms() == []


def test_unregister_for_the_process():
    with using(PluginManager()) as manager:
        modulm.register("schedulers", "last", Last)
        modulm.unregister("schedulers", "last")
        assert "last" not in {d.name for d in manager.names("schedulers")}


REPLAY = """
import sys, pickle
from modulm.plugins import PluginManager
manager = PluginManager.replay(pickle.loads(bytes.fromhex(sys.stdin.read())))
print(manager.load("schedulers", "near").name, manager.load("schedulers", "filed").name)
import json
print(json.__file__)
"""
DRIVER_FILE = """
import modulm
from modulm.contracts.policy import Policy

class Near(Policy):
    name = "near"
    api = 1
    def key(self, request): return 0
    def victim(self, running): return 0
"""


def test_a_worker_finds_what_stands_beside_the_program_and_nothing_else_there(
    tmp_path, monkeypatch
):
    (tmp_path / "near_module.py").write_text(DRIVER_FILE)
    (tmp_path / "json.py").write_text("raise ImportError('not mine')")
    filed = DRIVER_FILE + "\nmodulm.register('schedulers', 'filed', Near)\n"
    (tmp_path / "filed.py").write_text(filed)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with using(PluginManager()) as manager:
        load_file("tool_parser_plugin", "filed.py")
        manager.register("schedulers", "near", "near_module:Near")
        packed = frames.pack_plugins(manager.snapshot())
    sent = pickle.dumps(frames.unpack_plugins(packed)).hex()
    command = [sys.executable, "-c", REPLAY]
    done = subprocess.run(
        command, input=sent, env=isolated(), capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[0] == "near near", done.stderr
    assert str(tmp_path) not in done.stdout


@pytest.mark.parametrize("mode", [0o666, 0o646])
def test_a_file_that_anybody_may_write_to_is_not_run(tmp_path, mode):
    file = tmp_path / "filed.py"
    file.write_text("raise RuntimeError('it ran')")
    file.chmod(mode)
    with pytest.raises(ConfigError, match="writable by everyone"):
        load_file("tool_parser_plugin", str(file))


def test_a_file_that_is_run_is_logged_with_its_hash(tmp_path, caplog):
    file = tmp_path / "logged_file.py"
    file.write_text("x = 1")
    with caplog.at_level("INFO", "modulm.plugins"):
        load_file("tool_parser_plugin", str(file))
    assert f"{file}, sha256 {hashlib.sha256(b'x = 1').hexdigest()}" in caplog.text
    del sys.modules["modulm_file_logged_file"]


@pytest.mark.parametrize("target", ["no colon", "a:", ":b", "a b:c", "a:b()"])
def test_bad_target(target):
    with pytest.raises(PluginBroken, match="package.module:attribute"):
        PluginManager().register("schedulers", "x", target)


@pytest.mark.parametrize("name", ["", "a b", "a,b", "a/b"])
def test_bad_name(name):
    with pytest.raises(PluginBroken, match="a name has no space, comma or slash"):
        PluginManager().register("schedulers", name, "a.b:C")


def test_process_wide_manager():
    with using(PluginManager()) as manager:
        register("schedulers", "last", Last)
        assert current() is manager
        configured = configure("-plugins")
        assert current() is configured
        assert configured.load("schedulers", "last") is Last
        assert "plugins" not in {d.name for d in configured.names("commands")}


def test_replay_in_a_worker():
    manager = PluginManager()
    manager.register("schedulers", "path", "modulm.contracts.policy:Policy")
    manager.register("schedulers", "last", Policy)
    sent = pickle.loads(pickle.dumps(manager.snapshot()))
    worker = PluginManager.replay(sent)
    assert {d.name for d in worker.names("schedulers")} >= {"path", "last"}
    assert worker.find("schedulers", "last").target == "modulm.contracts.policy:Policy"


def test_replay_where_other_versions_are_installed(install, driver):
    snapshot = PluginManager().snapshot()
    install("modulm-a", {"modulm.schedulers": {"x": "mod_a:Shortest"}}, {"mod_a": driver})
    with pytest.raises(PluginConflict, match="modulm-a differ"):
        PluginManager.replay(snapshot)


def test_object_that_no_worker_can_import():
    class Local(Last):
        pass

    manager = PluginManager()
    manager.register("schedulers", "local", Local)
    with pytest.raises(PluginError, match="register it as 'package.module:attribute'"):
        manager.snapshot()


@pytest.fixture
def options():
    manager = PluginManager()
    manager.register("schedulers", "last", Last)
    return lambda **table: manager.options("schedulers", "last", table)


def test_options_structured(options):
    value = options(blocks=3, share=1, inner={"depth": 2})
    assert value == Last.Config(3, 1.0, False, Last.Config.Inner(2))


@pytest.mark.parametrize(
    ("table", "field", "message"),
    [
        (
            {"blocks": 1, "blokcs": 2},
            "schedulers.last",
            "option blokcs; there are blocks",
        ),
        ({"blocks": 1, "inner": {"deep": 1}}, "schedulers.last.inner", "deep"),
        ({"blocks": "4"}, "schedulers.last.blocks", "not of type int"),
        ({"blocks": True}, "schedulers.last.blocks", "not of type int"),
        ({"blocks": 1, "on": 1}, "schedulers.last.on", "not of type bool"),
        ({}, "schedulers.last.blocks", "required"),
    ],
)
def test_bad_options_name_their_path(options, table, field, message):
    with pytest.raises(ConfigError, match=message) as error:
        options(**table)
    assert error.value.field == field


def test_options_for_a_driver_without_any(install, driver):
    install("modulm-a", {"modulm.schedulers": {"shortest": "mod_a:Shortest"}}, {"mod_a": driver})
    manager = PluginManager()
    assert manager.options("schedulers", "shortest", {}) is None
    with pytest.raises(ConfigError, match="takes no options, got size"):
        manager.options("schedulers", "shortest", {"size": 1})
