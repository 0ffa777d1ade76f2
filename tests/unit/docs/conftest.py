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
    paths = [str(path) for path in folder.glob("modulm-*")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def command_of(line: str) -> list[str]:
    arguments = shlex.split(line)
    programs = {"modulm": [sys.executable, "-m", "modulm.cli.main"], "python": [sys.executable]}
    return [*programs[arguments[0]], *arguments[1:]]


#: A block that is a file, which those of later sections import.
NAMED = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Runs files in children of one process, so that what takes long to import is imported once.
_EACH = """
import os, runpy, sys
import torch, modulm, modulm_frontend.llm
for path in sys.argv[1:]:
    sys.stdout.flush()
    child = os.fork()
    if not child:
        sys.argv = [path]
        try:
            runpy.run_path(path, run_name="__main__")
        except BaseException:
            import traceback
            traceback.print_exc()
            print(f"in {path}:", open(path).read(), sep="\\n", file=sys.stderr, flush=True)
            os._exit(1)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
"""


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
def run_page(tmp_path: Path) -> Callable[[str], None]:
    """Runs docs/PAGE.md: its shell lines, then the Python of each section alone."""

    def run_one(page: str) -> None:
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        for language, block in BLOCK.findall(text):
            if language == "bash":
                for line in block.splitlines():
                    run(command_of(line), tmp_path)
        for name, block in NAMED.findall(text):
            (tmp_path / name).write_text(block, encoding="utf-8")
        files = []
        for number, code in enumerate(sections(text), 1):
            files.append(f"section_{number}.py")
            (tmp_path / files[-1]).write_text(code, encoding="utf-8")
        if files:
            run([sys.executable, "-c", _EACH, *files], tmp_path)

    return run_one
