"""`modulm.toml` says what a package needs; the list shows it and the doctor checks it."""

from __future__ import annotations

import json
import sys
import tomllib

import pytest
from click.testing import CliRunner

from modulm.plugins import PluginManager
from modulm.plugins.manager import using
from modulm_command_plugins.command import command
from modulm_command_plugins.manifest import manifest_problems
from modulm_command_plugins.template import names_of, rendered, templates

GOOD = """
modulm = "0.1"
[contracts]
schedulers = [1, 1]
[needs]
network = ["example.org", "*.example.com"]
subprocesses = ["git"]
"""


@pytest.fixture
def write(install, driver, tmp_path):
    (tmp_path / "mod_pkg").mkdir()
    points = {"modulm.schedulers": {"short": "mod_pkg.inner:Shortest"}}
    sources = {"mod_pkg/__init__": "", "mod_pkg/inner": driver}
    install("modulm-needy", points, sources)
    return lambda text: (tmp_path / "mod_pkg/modulm.toml").write_text(text)


def problems() -> list[str]:
    return list(manifest_problems(PluginManager().find("schedulers", "short")))


def test_the_list_shows_what_a_package_needs(write) -> None:
    write(GOOD)
    with using(PluginManager()):
        shown = CliRunner().invoke(command, ["list", "schedulers", "--metadata"]).stdout
        rows = json.loads(
            CliRunner().invoke(command, ["list", "schedulers", "--metadata", "--json"]).stdout
        )
    needs = {row["name"]: row["needs"] for row in rows}
    assert needs["short"] == "network (example.org *.example.com), subprocesses (git)"
    assert needs["fcfs"] == ""
    assert needs["short"] in shown
    assert "mod_pkg" not in sys.modules
    assert problems() == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("[1, 1]", "[1, 2]"), "schedulers is [1, 2], the driver's api is [1, 1]"),
        (GOOD.replace("schedulers", "loaders"), "[contracts] has no range for schedulers"),
        (GOOD.replace('"0.1"', '"9.0"'), "it needs modulm 9.0, this is "),
        (GOOD.replace('"0.1"', '"new"'), "modulm = 'new' is no version"),
        (GOOD.replace("network", "internet"), "is not valid: needs: unknown option internet"),
        ("[contracts", "is not valid"),
    ],
)
def test_the_doctor_compares_a_manifest_with_the_source(write, text, message) -> None:
    write(text)
    (problem,) = problems()
    assert message in problem


def test_no_manifest_is_no_problem(write) -> None:
    assert problems() == []


def test_every_template_writes_a_manifest_that_fits_its_driver(tmp_path, install) -> None:
    for index, kind in enumerate(templates()):
        names = names_of(kind, f"Thing{index}")
        files = rendered(names)
        folder = tmp_path / names.package
        folder.mkdir()
        for path, text in files.items():
            if path.startswith(names.package):
                (tmp_path / path).write_text(text)
        points = tomllib.loads(files["pyproject.toml"])["project"]["entry-points"]
        install(names.distribution, {names.group: points[names.group]}, {})
    manager = PluginManager()
    ours = [d for d in manager.everything() if "hing" in d.distribution]
    assert len(ours) == len(templates())
    assert [p for declaration in ours for p in manifest_problems(declaration)] == []
