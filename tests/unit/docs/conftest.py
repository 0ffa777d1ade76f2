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
#: A block that is a file, which those of later sections import.
NAMED = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

#: Arguments of Python, the folder to run in, folders to import from -> exit status and output.
RunPython = Callable[[list[str], Path, list[str]], tuple[int, str]]


@pytest.fixture(scope="session")
def run_python() -> RunPython:
    """Runs Python programs, in forks of a process that has imported torch (`forked_python`)."""

    def run_one(arguments: list[str], folder: Path, paths: list[str]) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=folder, text=True, errors="replace", check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
        return done.returncode, done.stdout

    return run_one


def arguments_of(line: str) -> list[str]:
    program, *arguments = shlex.split(line)
    return {"modulm": ["-m", "modulm.cli.main"], "python": list[str]()}[program] + arguments


def sections(text: str) -> list[str]:
    """The Python of each section (`##`) of a page: what is read, and pasted, together."""
    codes = [
        "\n".join(code for language, code in BLOCK.findall(section) if language == "python")
        for section in re.split(r"^## ", without_code_headings(text), flags=re.MULTILINE)
    ]
    return [code for code in codes if code]


def without_code_headings(text: str) -> str:
    """A page in which no line of a block looks like a heading: comments are indented by a space."""
    return BLOCK.sub(lambda block: re.sub(r"(?m)^## ", "#  ", block[0]), text)


@pytest.fixture
def run_page(tmp_path: Path, run_python: RunPython) -> Callable[[str], None]:
    """Runs docs/PAGE.md: its shell lines, then the Python of each section alone."""

    def run(arguments: list[str], code: str) -> None:
        # Packages that the page made can be imported without installing them.
        paths = [str(path) for path in tmp_path.glob("modulm-*")]
        status, output = run_python(arguments, tmp_path, paths)
        assert status == 0, f"{code}\n{output}"

    def run_one(page: str) -> None:
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        for language, block in BLOCK.findall(text):
            if language == "bash":
                for line in block.splitlines():
                    run(arguments_of(line), line)
        for name, block in NAMED.findall(text):
            (tmp_path / name).write_text(block, encoding="utf-8")
        for number, code in enumerate(sections(text), 1):
            (tmp_path / f"section_{number}.py").write_text(code, encoding="utf-8")
            run([f"section_{number}.py"], code)

    return run_one
