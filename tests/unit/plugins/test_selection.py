"""Allow and deny lists."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from modulm.errors import ConfigError, PluginNotFound
from modulm.plugins import PluginManager, records
from modulm.plugins.manager import using
from modulm.plugins.selection import Selection
from modulm_command_plugins.command import command

POINTS = {"modulm.schedulers": {"one": "mod_a:Shortest"}}
OTHER = {"modulm.schedulers": {"two": "mod_b:Shortest"}}


@pytest.fixture
def both(install, driver):
    install("modulm-a", POINTS, {"mod_a": driver})
    install("modulm-b", OTHER, {"mod_b": driver})


def allowed(text: str) -> set[str]:
    manager = PluginManager(Selection.parse(text))
    return {d.name for d in manager.names("schedulers")} & {"one", "two"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {"one", "two"}),
        ("modulm-a", {"one"}),
        ("modulm_A", {"one"}),
        ("two", {"two"}),
        ("schedulers/two", {"two"}),
        ("-one", {"two"}),
        ("-modulm-b", {"one"}),
        ("modulm-a, modulm-b, -two", {"one"}),
        ("-one,-two", set()),
        ("first-party", set()),
        ("first-party,modulm-b", {"two"}),
        ("-first-party", {"one", "two"}),
        ("modulm-a==1.0", {"one"}),
        ("modulm-a==1.0,-modulm-b==2.0,modulm-b", {"one", "two"}),
    ],
)
def test_lists(both, text, expected):
    assert allowed(text) == expected


def test_allow_list_keeps_the_core(both):
    manager = PluginManager(Selection.parse("modulm-a"))
    assert "plugins" in {d.name for d in manager.names("commands")}


@pytest.mark.parametrize("text", ["modulm-c", "-onne", "one,tow", "modulm-a==1.1"])
def test_unknown_name(both, text):
    with pytest.raises(ConfigError, match="no installed plugin is called") as error:
        PluginManager(Selection.parse(text)).find("schedulers", "fcfs")
    assert error.value.field == "plugins"
    assert "did you mean" in str(error.value)


def test_first_party_is_all_of_this_projects(both):
    only = {d.name for d in PluginManager(Selection.parse("first-party")).names("schedulers")}
    assert {"fcfs", "priority"} <= only
    assert "one" not in only
    with pytest.raises(PluginNotFound, match="disabled by --plugins=-first-party"):
        PluginManager(Selection.parse("-first-party")).find("schedulers", "fcfs")


def test_a_stale_deny_list_hurts_whoever_asks_for_a_driver_and_no_command(both):
    manager = PluginManager(Selection.parse("-gone"))
    assert "one" in {d.name for d in manager.names("schedulers")}
    assert manager.find("commands", "plugins").name == "plugins"
    with pytest.raises(ConfigError, match="no installed plugin is called 'gone'"):
        manager.find("schedulers", "one")


def test_lonely_minus():
    with pytest.raises(ConfigError, match="followed by a name"):
        Selection.parse("a,-")


def test_switched_off_is_said(both):
    manager = PluginManager(Selection.parse("-one"))
    with pytest.raises(PluginNotFound, match=r"modulm-a 1.0 is disabled by --plugins=-one"):
        manager.load("schedulers", "one")


def test_text_round_trip():
    assert str(Selection.parse(" a, -c ,b")) == "a,b,-c"


def test_environment_variable(both, tmp_path):
    code = (
        "from modulm.plugins import current;"
        "print(*[d.name for d in current().names('schedulers') if d.name in ('one', 'two')])"
    )
    env = os.environ | {"MODULM_PLUGINS": "-one", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["two"]


def recorded(folder: Path, name: str = "modulm_a", *modules: str) -> str:
    """Write the RECORD that an installer would have written; its digest."""
    lines = [f"{name}-1.0.dist-info/RECORD,,"]
    for file in sorted(folder.glob(f"{name}-1.0.dist-info/[!R]*")) + [folder / m for m in modules]:
        digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).decode()
        path = file.relative_to(folder)
        lines.append(f"{path},sha256={digest.rstrip('=')},{file.stat().st_size}")
    text = "\n".join(lines) + "\n"
    (folder / f"{name}-1.0.dist-info/RECORD").write_text(text)
    for cached in (records.record_digest, records.altered_files):
        cached.cache_clear()
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_package_is_pinned_by_the_digest_of_its_files(install, driver, tmp_path):
    """P05: other files than those that were pinned are refused, and not imported."""
    install("modulm-a", POINTS, {"mod_a": driver})
    install("modulm-b", OTHER, {"mod_b": driver})
    digest = recorded(tmp_path, "modulm_a", "mod_a.py")
    assert allowed(f"modulm-a@sha256:{digest}") == {"one"}
    assert allowed(f"modulm-a==1.0@sha256:{digest}") == {"one"}
    with pytest.raises(ConfigError, match=f"did you mean modulm-a==1.0@sha256:{digest}"):
        allowed(f"modulm-a@sha256:{'0' * 64}")
    (tmp_path / "mod_a.py").write_text("raise SystemExit('imported')\n")
    records.altered_files.cache_clear()
    with pytest.raises(ConfigError, match=r"changed since it was installed: mod_a\.py"):
        allowed(f"modulm-a@sha256:{digest}")
    assert "mod_a" not in sys.modules
    with pytest.raises(ConfigError, match="did you mean modulm-b==1.0"):
        allowed(f"modulm-b@sha256:{digest}")


def test_what_is_listed_and_verified_says_whose_files_they_are(install, driver, tmp_path):
    """P17, P18: digests without an import; changed, added and lost files are named."""
    install("modulm-a", POINTS, {"mod_a": driver})
    folder = tmp_path / "pack_a"
    folder.mkdir()
    for name in ("__init__", "kept", "lost"):
        (folder / f"{name}.py").write_text(f"raise SystemExit({name!r})\n")
    digest = recorded(
        tmp_path, "modulm_a", "mod_a.py", *(f"pack_a/{n}.py" for n in ("__init__", "kept", "lost"))
    )
    run = CliRunner()
    fresh = ["list", "--json", "schedulers"], ["verify", "modulm-a", "--json"]
    with using(PluginManager()):
        listing, good = (run.invoke(command, arguments) for arguments in fresh)
    listed = json.loads(listing.stdout)
    (row,) = (row for row in listed if row["distribution"] == "modulm-a")
    assert (row["name"], row["version"], row["record_sha256"]) == ("one", "1.0", digest)
    assert (good.exit_code, json.loads(good.stdout)[0]["state"]) == (0, "as installed")
    (folder / "lost.py").unlink()
    (folder / "kept.py").write_text("raise SystemExit('other')\n")
    (folder / "added.py").write_text("raise SystemExit('added')\n")
    records.altered_files.cache_clear()
    with using(PluginManager()):
        bad = run.invoke(command, ["verify", "modulm-a"])
    assert bad.exit_code == 1
    assert digest in bad.stdout
    for name in ("lost", "kept", "added"):
        assert f"pack_a/{name}.py" in bad.stdout
    assert "pack_a/__init__.py" not in bad.stdout
    assert not {"mod_a", "pack_a"} & set(sys.modules)


def test_plugins_come_in_the_same_order_in_every_process(both, tmp_path):
    """P20."""
    script = (
        "from modulm.plugins import manager; "
        "print([f'{d.kind}/{d.name}/{d.distribution}' for d in manager.current().everything()])"
    )
    orders = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    (order,) = orders
    assert "schedulers/one/modulm-a" in order
