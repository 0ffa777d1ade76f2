"""Numbers, links, paths and flags that README.md and docs/ quote are those of the code.

Whatever a page states as `N <noun>` for a noun below is counted in the pyproject files.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from modulm.config.schema.catalog import catalog
from modulm.plugins.kinds import find_kind, kind_names

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
#: Decision records and the changelog tell what was true when they were written.
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")], key=lambda path: path.name
)
PAGES.remove(DOCS / "changelog.md")
#: Packages of models that are no family: the embedded checkpoint and two bridges.
NO_FAMILY = {"modulm-transformers", "modulm-multimodal-text", "modulm-demo"}


@cache
def projects() -> Mapping[Path, Mapping[str, Any]]:
    """The [project] table of every package, by folder."""
    tables = {}
    for top in ("core", "plugins", "kernels"):
        for file in (ROOT / top).rglob("pyproject.toml"):
            tables[file.parent] = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    root = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {ROOT: root["project"], **tables}


def names(kind: str) -> set[str]:
    """Every name that a package of this repository offers in an entry-point group."""
    tables = (project.get("entry-points", {}) for project in projects().values())
    return {name for table in tables for name in table.get(f"modulm.{kind}", ())}


def families() -> list[Mapping[str, Any]]:
    """The packages that implement architectures with code of their own."""
    folder = ROOT / "plugins/models"
    return [
        project
        for path, project in projects().items()
        if path.parent == folder and project["name"] not in NO_FAMILY
    ]


def architectures() -> int:
    return sum(len(each["entry-points"].get("modulm.models", ())) for each in families())


FACTS: Mapping[str, Callable[[], int]] = {
    "model families": lambda: len(families()),
    "families": lambda: len(families()),
    "architectures": architectures,
    "tool-call formats": lambda: len(names("tool_parsers")),
    "tool formats": lambda: len(names("tool_parsers")),
    "tool parsers": lambda: len(names("tool_parsers")),
    "reasoning formats": lambda: len(names("reasoning_parsers")),
    "reasoning parsers": lambda: len(names("reasoning_parsers")),
    "route families": lambda: len(names("routes")),
    "quantization methods": lambda: len(names("quantization")),
    "kinds of drivers": lambda: len(kind_names()),
}
_QUOTED = re.compile(rf"(?<![\w.,])(\d[\d,]*)\s+({'|'.join(FACTS)})\b")


def stated(text: str) -> Iterator[tuple[str, int]]:
    """(noun, number) of every count in a text."""
    for match in _QUOTED.finditer(text):
        yield match[2], int(match[1].replace(",", ""))


def test_counts_are_those_of_the_packages() -> None:
    wrong = [
        f"{page.name}: {number} {noun}, the packages have {FACTS[noun]()}"
        for page in PAGES
        for noun, number in stated(page.read_text(encoding="utf-8"))
        if number != FACTS[noun]()
    ]
    assert not wrong, "\n".join(wrong)
    assert set(dict(stated((ROOT / "README.md").read_text(encoding="utf-8")))) >= {
        "model families", "architectures", "tool-call formats", "reasoning formats",
    }  # fmt: skip


def test_a_wrong_count_is_found() -> None:
    assert list(stated("runs 3 model families with\n1,200 architectures")) == [
        ("model families", 3), ("architectures", 1200),
    ]  # fmt: skip
    assert FACTS["model families"]() > 40


# Links and paths


def anchors(text: str) -> set[str]:
    """What a page's headings can be linked by."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", prose, re.M)}


def slug(heading: str) -> str:
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", shown.lower()).strip().replace(" ", "-")


def test_links_lead_to_headings() -> None:
    lost = []
    for page in [*PAGES, *(DOCS / "adr").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\(([\w./-]*?)#([\w-]+)\)", text):
            if target and not target.endswith(".md"):
                continue
            other = page.parent / target if target else page
            if anchor not in anchors(other.read_text(encoding="utf-8")):
                lost.append(f"{page.name}: {target}#{anchor}")
    assert not lost, "\n".join(lost)


_PATH = re.compile(
    r"`((?:core|plugins|kernels|tests|bench|tools|deploy)/[\w./-]+)(?: [^`\n]*)?`"
    r"|(?:python|^) ((?:bench|tools|tests)/[\w./-]+\.(?:py|sh))",
    re.M,
)


def test_paths_of_the_repository_exist() -> None:
    lost = [
        f"{page.name}: {path}"
        for page in PAGES
        for pair in _PATH.findall(page.read_text(encoding="utf-8"))
        for path in pair
        if path and not (ROOT / path).exists()
    ]
    assert not lost, "\n".join(lost)


# Flags and groups


@cache
def flags() -> set[str]:
    """Every flag that a package here has, as it is typed."""
    known = {*catalog().specs, *catalog().tables, *catalog().aliases}
    return {f"--{name.replace('_', '-')}" for name in known}


def test_the_table_of_drivers_names_flags_that_exist() -> None:
    rows = re.findall(
        r"^\| `(modulm\.\w+)` \|[^|]*\| ([^|]*) \|$", (DOCS / "drivers.md").read_text(), re.M
    )
    assert {group for group, _ in rows} == {find_kind(name).group for name in kind_names()}
    chosen = {flag for _, cell in rows for flag in re.findall(r"`(--[a-z-]+)", cell)}
    assert chosen - flags() == {"--model"} - flags()


@pytest.mark.parametrize("page", ["from-vllm", "vllm-scripts", "from-ollama", "index"])
def test_features_that_exist_are_not_called_missing(page: str) -> None:
    """What a page lists as not supported is no name that a package offers."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    section = text.partition("## Not supported yet")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(--[\w.-]+)`", section))
    assert named & flags() == set()


def test_the_table_of_media_has_the_kinds_of_the_families() -> None:
    rows = re.findall(
        r"^\| `(modulm-[\w-]+)` \| [^|]+ \|([^|]*)\|([^|]*)\|([^|]*)\|$",
        (DOCS / "media.md").read_text(encoding="utf-8"), re.M,
    )  # fmt: skip
    columns = ("image", "video", "audio")
    listed: dict[str, set[frozenset[str]]] = {}
    for package, *marks in rows:
        kinds = frozenset(
            k for k, mark in zip(columns, marks, strict=True) if mark.strip() == "yes"
        )
        listed.setdefault(package, set()).add(kinds)
    offered: dict[str, set[frozenset[str]]] = {}
    for project in families():
        for target in project["entry-points"].get("modulm.media_families", {}).values():
            module, _, name = target.partition(":")
            kinds = frozenset(getattr(importlib.import_module(module), name).kinds)
            if kinds != {"text"}:
                offered.setdefault(project["name"], set()).add(kinds)
    assert listed == offered


def test_budgets_in_contributing_are_those_of_the_tool() -> None:
    spec = importlib.util.spec_from_file_location("tool_size", ROOT / "tools/size.py")
    assert spec is not None
    assert spec.loader is not None
    size = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(size)
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    budgets = f"a file {size.FILE}, a function {size.FUNCTION}, a model file {size.MODEL}"
    assert f"{budgets}, the core {size.CORE:,}." in " ".join(text.split())


def test_the_faults_of_first_use_have_their_tests() -> None:
    """Each test that the record of the first users' faults names exists."""
    text = (ROOT / "bench/results/2026-11-27-first-use.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 15
    for path, function in named:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {function}" in source, f"{path} has no {function}"
