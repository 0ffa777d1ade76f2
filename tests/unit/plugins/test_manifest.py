"""`modulm.toml` says what a package needs; the list shows it and the doctor checks it."""

from __future__ import annotations

import json
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from attrs import asdict
from click.testing import CliRunner

from modulm.plugins import PluginManager
from modulm.plugins.declaration import Declaration
from modulm.plugins.index import is_first_party
from modulm.plugins.manager import using
from modulm_command_plugins.command import command
from modulm_command_plugins.manifest import manifest_problems, read_manifest
from modulm_command_plugins.source_needs import shown_needs
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
    more = "import json\nimport subprocess\n"
    sources = {"mod_pkg/__init__": "", "mod_pkg/inner": driver, "mod_pkg/more": more}
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
    manifest = {row["name"]: row["manifest"] for row in rows}["short"]
    assert manifest["contracts"] == {"schedulers": [1, 1]}
    assert (manifest["modulm"], manifest["needs"]["files"]) == ("0.1", [])
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
        (
            GOOD.replace('["git"]', "[]"),
            "[needs] subprocesses is empty, and more.py:2 uses subprocess",
        ),
    ],
)
def test_the_doctor_compares_a_manifest_with_the_source(write, text, message) -> None:
    write(text)
    (problem,) = problems()
    assert message in problem


def test_no_manifest_is_no_problem(write) -> None:
    assert problems() == []


def test_every_package_of_this_project_states_contracts_and_needs() -> None:
    ours = {d.distribution: d for d in PluginManager().everything()}
    faults = []
    for declaration in filter(lambda d: is_first_party(d.distribution), ours.values()):
        manifest = read_manifest(declaration)
        project = tomllib.loads(project_file(declaration).read_text())
        if manifest is None or project["tool"]["modulm"] != {
            "modulm": manifest.modulm,
            "contracts": {kind: list(span) for kind, span in manifest.contracts.items()},
            "needs": {name: list(v) for name, v in asdict(manifest.needs).items() if v},
        }:
            faults.append(f"{declaration}: modulm.toml is not what its pyproject.toml says")
    assert len(ours) > 200
    assert faults == [], "run tools/workspace.py sync"


def project_file(declaration: Declaration) -> Path:
    spec = find_spec(declaration.target.partition(":")[0].partition(".")[0])
    return Path(spec.origin).parents[1] / "pyproject.toml"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("import urllib.request", {"network": (1, "urllib.request")}),
        ("from huggingface_hub import x", {"network": (1, "huggingface_hub.x")}),
        ("import json\nPath(x).open('wb')", {"files": (2, "open")}),
        ("open(path, mode='a')\n", {"files": (1, "open")}),
        ("def f():\n    import triton.language as tl", {"devices": (2, "triton.language")}),
        ("torch.cuda.synchronize()", {"devices": (1, "torch.cuda.synchronize")}),
        ("if TYPE_CHECKING:\n    import httpx\nopen(x)\nopen(x, 'r')\nx.open('rb')", {}),
        ("def w(p):\n    p.write_text('')\nclass A:\n    kit_sample = staticmethod(w)", {}),
    ],
)
def test_needs_are_read_from_source(tmp_path, source, shown) -> None:
    (tmp_path / "mod.py").write_text(source)
    found = shown_needs([tmp_path / "mod.py"])
    assert {need: tuple(where[1:]) for need, where in found.items()} == shown


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
