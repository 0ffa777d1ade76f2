"""Running the code of a page as it stands, top to bottom."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"
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


@pytest.fixture
def run_page(tmp_path: Path) -> Callable[[str], None]:
    """Runs docs/PAGE.md: its shell lines, then all its Python as one program."""

    def run_one(page: str) -> None:
        blocks = BLOCK.findall((DOCS / f"{page}.md").read_text())
        for language, text in blocks:
            if language == "bash":
                for line in text.splitlines():
                    run(command_of(line), tmp_path)
        code = "\n".join(text for language, text in blocks if language == "python")
        (tmp_path / "page.py").write_text(code)
        run([sys.executable, "page.py"], tmp_path)

    return run_one
