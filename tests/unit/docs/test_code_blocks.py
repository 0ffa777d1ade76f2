"""The code in the pages runs as it stands, top to bottom."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"
GUIDES = ("embeddings", "examples", "quantization", "sampling")
PAGES = (
    *("../README", "drivers", "write-a-plugin", *GUIDES),
    *sorted(path.stem for path in DOCS.glob("plugins-*.md")),
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def environment(folder: Path) -> dict[str, str]:
    """Packages that the page made can be imported without installing them."""
    made = [str(path) for path in folder.glob("modulm-*")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(made), "OMP_NUM_THREADS": "1"}


def run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def command_of(line: str) -> list[str]:
    words = shlex.split(line)
    programs = {"modulm": [sys.executable, "-m", "modulm.cli.main"], "python": [sys.executable]}
    return [*programs[words[0]], *words[1:]]


@pytest.mark.parametrize("page", PAGES)
def test_page(page: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((DOCS / f"{page}.md").read_text())
    for language, text in blocks:
        if language == "bash":
            for line in text.splitlines():
                run(command_of(line), tmp_path)
    code = "\n".join(text for language, text in blocks if language == "python")
    (tmp_path / "page.py").write_text(code)
    run([sys.executable, "page.py"], tmp_path)


def test_links_between_pages() -> None:
    for page in (*DOCS.glob("*.md"), *DOCS.parent.glob("*.md")):
        for target in re.findall(r"\]\(([\w./-]+\.md)\)", page.read_text()):
            assert (page.parent / target).is_file(), f"{page.name} links to {target}"


def test_every_group_is_in_the_table() -> None:
    from modulm.plugins.kinds import KINDS

    text = (DOCS / "drivers.md").read_text()
    for kind in KINDS.values():
        assert f"`{kind.group}`" in text, kind.group
        if kind.contract is not None:
            path = kind.contract.removeprefix("modulm.").replace(":", ".")
            assert f"`{path}`" in text, path
