"""Running the code of a page as it stands, top to bottom."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: A block that is a file, which those of later sections import.
NAMED = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

#: Runs each command in a fork of a process that has imported what most pages import. A request is
#: a line of JSON; the answer is the exit status. Only modules are shared: no plugin manager, no
#: engine and no thread exists in the parent.
_FORK_SERVER = """
import json, os, runpy, sys, threading, traceback
import click, pytest, tokenizers, torch, transformers
import modulm, modulm.cli.main, modulm.engine.worker.worker, modulm_frontend.llm, modulm_server.app
assert threading.active_count() == 1, threading.enumerate()
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if not child:
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, flush=True)
else:
    sys.exit()
nothing = os.open(os.devnull, os.O_RDONLY)
output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
for source, target in ((nothing, 0), (output, 1), (output, 2)):
    os.dup2(source, target)
os.chdir(request["folder"])
os.environ["PYTHONPATH"] = os.pathsep.join(request["paths"])
sys.path[:0] = [request["folder"], *request["paths"]]
first, *rest = request["arguments"]
status = 0
try:
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")
except SystemExit as stop:
    status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
except BaseException:
    traceback.print_exc()
    status = 1
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
"""

#: Arguments of Python, the folder to run in, folders to import from -> exit status and output.
RunPython = Callable[[list[str], Path, list[str]], tuple[int, str]]


@pytest.fixture(scope="session")
def run_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunPython]:
    """Runs Python programs in forks of one process, so that torch is imported once."""
    output = tmp_path_factory.mktemp("forked") / "output"
    server = subprocess.Popen(
        [sys.executable, "-c", _FORK_SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert server.stdin
    assert server.stdout
    requests, answers = server.stdin, server.stdout

    def run_one(arguments: list[str], folder: Path, paths: list[str]) -> tuple[int, str]:
        request = {
            "arguments": arguments, "folder": str(folder), "paths": paths, "output": str(output)
        }  # fmt: skip
        requests.write(json.dumps(request) + "\n")
        requests.flush()
        return int(answers.readline()), output.read_text(encoding="utf-8", errors="replace")

    with server:
        yield run_one


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
