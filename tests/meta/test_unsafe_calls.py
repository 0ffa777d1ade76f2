"""Nothing that is shipped can run what lies in a checkpoint or comes in a request.

Calls by which others have been broken into are named nowhere; who needs one says so here, and why.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [f for room in ("core", "plugins", "kernels") for f in sorted((ROOT / room).rglob("*.py"))]
#: Functions that run what they are given.
RUNNERS = {"eval", "exec", "compile"}
LOADERS = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}
#: Keywords with the value that switches a protection off.
SWITCHES = {"trust_remote_code": True, "weights_only": False, "shell": True, "allow_pickle": True}
#: A file without any of these words has nothing of it and is not parsed.
WORDS = re.compile(rf"(?<![.\w])({'|'.join(RUNNERS)})\b|\b({'|'.join([*LOADERS, *SWITCHES])})\b")
#: "file: what", each with its reason beside it.
ALLOWED: set[str] = set()


def unsafe(tree):
    """What of a module's calls and imports is on the lists above."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.partition(".")[0] in LOADERS)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LOADERS:
            errors = {"UnpicklingError", "PicklingError"}
            yield from (alias.name for alias in node.names if alias.name not in errors)
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in RUNNERS:
            yield node.func.id
        for keyword in node.keywords:
            value = getattr(keyword.value, "value", None)
            if keyword.arg in SWITCHES and value is SWITCHES[keyword.arg]:
                yield f"{keyword.arg}={value}"


def test_nothing_unsafe_is_called():
    found = {
        f"{file.relative_to(ROOT)}: {what}"
        for file in FILES
        if WORDS.search(text := file.read_text(encoding="utf-8"))
        for what in unsafe(ast.parse(text))
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "eval(text)",
        "run(command, shell=True)",
        "torch.load(file, weights_only=False)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "numpy.load(file, allow_pickle=True)",
    ],
)
def test_each_kind_is_seen(line):
    assert WORDS.search(line)
    assert list(unsafe(ast.parse(line)))
