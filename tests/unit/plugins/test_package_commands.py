"""Packages are found in indexes, installed with their digests checked, and removed.

Real wheels, made here, in a folder with an index, installed into a real environment by uv.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from index_wheels import POINTS, wheel

import modulm
from modulm.plugins import PluginManager
from modulm.plugins.manager import using
from modulm_command_plugins.command import command

API = 1  # of scheduling policies


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels of two packages, one of them in two versions, with an index."""
    folder = tmp_path_factory.mktemp("wheels")
    wheel(folder, "modulm-longest", "1.0", POINTS)
    wheel(folder, "modulm-longest", "1.10", POINTS)
    wheel(folder, "modulm-other", "2.0", "[modulm]\nother = modulm_other\n")
    done = run("index", str(folder), "--quality", "tested")
    assert done.exit_code == 0, done.output
    return folder


def run(*arguments: str) -> Result:
    with using(PluginManager()):
        return CliRunner().invoke(command, arguments)


def rows(*arguments: str) -> list[dict[str, str]]:
    listed: list[dict[str, str]] = json.loads(run(*arguments, "--json").stdout)
    return listed


def test_an_index_says_what_is_in_the_wheels(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    assert index["version"] == 1
    by_version = {(entry["name"], entry["version"]): entry for entry in index["packages"]}
    entry = by_version["modulm-longest", "1.10"]
    content = (folder / entry["url"]).read_bytes()
    assert entry == {
        "name": "modulm-longest",
        "version": "1.10",
        "summary": "A modulm-longest",
        "provides": ["schedulers/longest"],
        "contracts": {"schedulers": [API, API]},
        "quality": "tested",
        "url": "modulm_longest-1.10-py3-none-any.whl",
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    assert by_version["modulm-other", "2.0"]["provides"] == ["hooks/other"]


@pytest.mark.exhaustive
def test_search_finds_what_is_installed_and_what_an_index_adds(folder: Path) -> None:
    index = str(folder / "index.json")
    assert [row["name"] for row in rows("search", "longest", "--index", index)] == [
        "modulm-longest"
    ]
    (row,) = rows("search", "tested", "longest", "--index", index) or rows(
        "search", "longest", "--index", index
    )
    assert (row["version"], row["installed"], row["quality"]) == ("1.10", "-", "tested")
    (fcfs,) = rows("search", "schedulers/fcfs")
    assert fcfs["quality"] == "first-party"
    assert fcfs["installed"] == fcfs["version"] == modulm.__version__
    kinds = {row["name"] for row in rows("search", "--kind", "schedulers", "--index", index)}
    assert {"modulm-longest", fcfs["name"]} <= kinds
    assert "modulm-other" not in kinds


def test_outdated_compares_versions_and_not_texts(install, folder: Path) -> None:
    install("modulm-longest", {"modulm.schedulers": {"longest": "mod_x:X"}}, {}, version="1.9")
    done = run("outdated", "--json", "--index", str(folder / "index.json"))
    (row,) = json.loads(done.stdout)
    assert (row["name"], row["installed"], row["version"]) == ("modulm-longest", "1.9", "1.10")
    assert done.exit_code == 1
    assert run("outdated").exit_code == 0


def written(tmp_path: Path, **changes: Any) -> str:
    entry = {"name": "modulm-longest", "version": "1.0", "url": "x.whl", "sha256": "0" * 64}
    path = tmp_path / "index.json"
    path.write_text(json.dumps({"version": 1, "packages": [entry | changes]}))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": ""}, "modulm-longest: an entry with a url needs the sha256"),
        ({"quality": "best"}, "quality 'best' is none of first-party, tested, listed"),
        ({"quality": "first-party"}, "only packages of modulm are first-party"),
        ({"version": "newest"}, "'newest' is no version"),
        ({"colour": "red"}, "is no index of packages"),
    ],
)
def test_an_index_is_checked(tmp_path, changes, message) -> None:
    done = run("search", "--index", written(tmp_path, **changes))
    assert message in str(done.exception)
    assert "cannot read" in str(run("search", "--index", str(tmp_path / "none.json")).exception)
    plain = run("search", "--index", "http://127.0.0.1/index.json")
    assert "only https and paths are read" in str(plain.exception)


def test_install_refuses_what_is_not_the_lists(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"altered")
    altered = written(tmp_path)
    done = run("install", "modulm-longest", "--index", altered)
    assert "has the SHA-256" in str(done.exception)
    stale = written(tmp_path, contracts={"schedulers": [7, 8]})
    done = run("install", "modulm-longest", "--index", stale)
    assert f"was written for other contracts: schedulers 7 to 8, not {API}" in str(done.exception)
    done = run("install", "modulm-longst", "--index", str(folder / "index.json"))
    assert "did you mean modulm-longest" in str(done.exception)
    ours = written(tmp_path, name="modulm-server", version="99.0")
    done = run("install", "modulm-server", "--index", ours, "--dry-run")
    assert f"modulm-server=={modulm.__version__}" in done.stdout
    assert rows("search", "modulm-server", "--index", ours)[0]["version"] == modulm.__version__


def test_uninstall_names_who_needs_a_package() -> None:
    done = run("uninstall", "modulm-layers", "--dry-run")
    assert "modulm-layers is needed by modulm-apertus" in str(done.exception)
    done = run("uninstall", "schedulers/fcfs", "--dry-run")
    assert done.stdout.rstrip().endswith(" modulm-scheduler-fcfs"), done.output
    assert "no installed plugin is called 'torch'" in str(run("uninstall", "torch").exception)


def test_install_and_uninstall_in_a_real_environment(folder: Path, tmp_path: Path) -> None:
    home = tmp_path / "environment"
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "venv", "-q", "--offline", "--python", sys.executable, home], check=True)
    python = str(home / "bin/python")
    options = ["--python", python, "--installer-option=--offline", "--installer-option=--no-index"]
    index = ["--index", str(folder / "index.json")]
    done = run("install", "modulm-longest", *index, *options, "--dry-run")
    assert "uv pip install --python" in done.stdout
    assert "modulm_longest-1.10" in done.stdout
    assert not list(home.rglob("modulm_longest.py"))
    done = run("install", "modulm-longest==1.0", *index, *options)
    assert done.exit_code == 0, done.output
    assert "modulm plugins doctor modulm-longest" in done.stdout
    (module,) = home.rglob("modulm_longest.py")
    assert "1.0" in module.read_text()
    local = str(folder / "modulm_longest-1.10-py3-none-any.whl")
    assert run("install", local, *options).exit_code == 0
    assert "1.10" in module.read_text()
    needy = wheel(tmp_path, "modulm-needy", "1.0", POINTS, requires="click<1")
    assert run("install", str(needy), *options).exit_code != 0  # it wants another click


def test_a_removed_package_is_gone(install, tmp_path: Path) -> None:
    install("modulm-longest", {"modulm.schedulers": {"longest": "mod_x:X"}}, {})
    done = run("uninstall", "longest", "--dry-run")
    assert done.stdout.rstrip().endswith(" modulm-longest")
    assert "uninstall" in done.stdout
