"""Run-time registration, worker processes, and drivers' options."""

from __future__ import annotations

import pickle

import pytest
from attrs import frozen

from modulm.contracts.policy import Policy
from modulm.errors import ConfigError, PluginBroken, PluginConflict, PluginError
from modulm.plugins import PluginManager, register
from modulm.plugins.manager import configure, current, using


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
