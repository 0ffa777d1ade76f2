"""`plugins list` shows a stale contract version, and imports nothing for it."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from modulm.plugins import PluginManager
from modulm.plugins.manager import using
from modulm_command_plugins.command import command

SOURCES = {
    "own": ({"mod_x": "class P:\n    api = 9\n"}, "stale: for contract 9, not 1"),
    "range": ({"mod_x": "class P:\n    api: tuple = (7, 9)\n"}, "stale: for contract 7 to 9, not"),
    "inherited": ({"mod_x": "class B:\n    api = 9\nclass P(B):\n    x = 1\n"}, "stale: for c"),
    "imported": (
        {"mod_x/__init__": "from .inner import Q as P\n", "mod_x/inner": "class Q:\n    api = 9\n"},
        "stale: for contract 9, not 1",
    ),
    "absolute": (
        {"mod_x/__init__": "from mod_x.b import P\n", "mod_x/b": "from .c import P\n",
         "mod_x/c": "class P:\n    api = 9\n"},
        "stale: for contract 9, not 1",
    ),
    "fits": ({"mod_x": "class P:\n    api = (1, 9)\n"}, "ok"),
    "computed": ({"mod_x": "class P:\n    api = 3 + 6\n"}, "ok"),
    "endless": ({"mod_x": "class P(P):\n    pass\n"}, "ok"),
    "broken": ({"mod_x": "class P(:\n"}, "ok"),
    "missing": ({}, "ok"),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_list_shows_a_stale_version_without_an_import(install, tmp_path, name):
    modules, state = SOURCES[name]
    if any("/" in module for module in modules):
        (tmp_path / "mod_x").mkdir()
    install("modulm-x", {"modulm.schedulers": {"x": "mod_x:P"}}, modules)
    with using(PluginManager()):
        done = CliRunner().invoke(command, ["list", "schedulers", "--metadata", "--json"])
    rows = {row["name"]: row["state"] for row in json.loads(done.stdout)}
    assert rows["x"].startswith(state)
    assert rows["fcfs"] == "ok"
    assert "mod_x" not in sys.modules
