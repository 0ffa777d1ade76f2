"""A package that was written for the last release is used, with a warning for each old name."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

import modulm
from modulm.errors import PluginBroken
from modulm.plugins import PluginManager
from modulm_plugin_lock import ModulmDeprecationWarning, keep_old_name
from modulm_plugin_lock.old_names import UNTIL
from pytest_modulm import Installation

OLD = """
from modulm.config.schema.flags import flag_group
import modulm.config.schema.cache as cache
from modulm.contracts.connector import KVConnector
from modulm.plugins.manager import PluginManager
from modulm.config import ServerConfig
"""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Remove the modules and the look-ups that old names have added."""
    modules = dict(sys.modules)
    looked_up = {
        m: vars(m).get("__getattr__") for n, m in modules.items() if n.startswith("modulm")
    }
    yield
    for name in set(sys.modules) - set(modules):
        if name.startswith("modulm.") or name == "mod_old":
            parent, _, last = name.rpartition(".")
            vars(sys.modules.get(parent, modulm)).pop(last, None)
            del sys.modules[name]
    for module, before in looked_up.items():
        if before is None:
            vars(module).pop("__getattr__", None)
        else:
            module.__getattr__ = before


@pytest.fixture
def load(install: Installation, driver: str) -> Callable[[str], list[str]]:
    """Load a driver of a package whose module begins with these lines; returns the warnings."""

    def run(lines: str) -> list[str]:
        points = {"modulm.schedulers": {"old": "mod_old:Shortest"}}
        install("modulm-old", points, {"mod_old": lines.lstrip() + dedent(driver)})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            PluginManager().load("schedulers", "old")
        ours = [w for w in caught if w.category is ModulmDeprecationWarning]
        return [f"{Path(w.filename).name}:{w.lineno}: {w.message}" for w in ours]

    return run


def test_old_names_work_and_warn_once_for_each_place(load) -> None:
    told = load(OLD)
    ends = f"; the old name works until modulm {UNTIL}"
    flags, config = "modulm.config.schema.flags.flag_group", "modulm.config.ServerConfig"
    assert told == [
        f"mod_old.py:1: {flags} is now modulm.contracts.flags.flag_group{ends}",
        f"mod_old.py:5: {config} is now modulm_server.flags.ServerConfig{ends}",
    ]
    from modulm.contracts.flags import flag_group

    module = sys.modules["mod_old"]
    assert module.flag_group is flag_group
    with pytest.warns(ModulmDeprecationWarning, match=r"cache\.CacheConfig is now"):
        assert module.cache.CacheConfig.__module__ == "modulm.contracts.config.cache"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("from modulm.config import LoRAConfig\n", "gone, since nothing reads its flags"),
        ("from modulm.config import NoSuchName\n", "cannot import name 'NoSuchName'"),
        ("import modulm.no_such_module\n", "No module named 'modulm.no_such_module'"),
        ("import json.no_such\n", "No module named 'json.no_such'"),
    ],
)
def test_what_has_no_new_name_is_an_error(load, source, message) -> None:
    with pytest.raises(PluginBroken, match=message):
        load(source)


def test_packages_of_modulm_get_no_old_names(load, monkeypatch) -> None:
    monkeypatch.setattr("modulm.plugins.drivers.is_first_party", lambda name: True)
    with pytest.raises(PluginBroken, match="is now modulm_server"):
        load("from modulm.config import ServerConfig\n")


def test_other_errors_are_left_alone() -> None:
    assert not keep_old_name(ValueError("No module named 'modulm.config.schema.cache'"))
    assert not keep_old_name(None)
