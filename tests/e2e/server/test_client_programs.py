"""Real clients in an environment of their own, each a script, against one server of `demo` and one
of a tiny embedding model. docs/clients.md says the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from modulm.testing.checkpoints import make_tiny

pytestmark = pytest.mark.exhaustive

HERE = Path(__file__).parent / "clients"
SCRIPTS = sorted(path.stem.removeprefix("with_") for path in HERE.glob("with_*.py"))
TOOLS = Path(__file__).resolve().parents[2] / "support/tool_server.py"


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the Python of an environment that has a script's client, and nothing of modulm: of one
    for those with requirements of their own, and of one for all others.
    """
    uv, made = Path(sys.executable).with_name("uv"), dict[Path, Path]()

    def python_of(name: str) -> Path:
        own = HERE / f"requirements_{name}.txt"
        file = own if own.exists() else HERE / "requirements.txt"
        if file not in made:
            place = tmp_path_factory.mktemp("clients") / "venv"
            python = made[file] = place / "bin/python"
            venv = [uv, "venv", "--quiet", "--python", sys.executable, place]
            subprocess.run(venv, check=True)
            install = [uv, "pip", "install", "--quiet", "--python", python, "-r", file]
            subprocess.run(install, check=True)
        return made[file]

    return python_of


@pytest.fixture(scope="module")
def chat(
    serve_here: Callable[..., AbstractContextManager[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    with serve_here(tmp_path_factory.mktemp("chat") / "log", ["demo"]) as url:
        yield url


@pytest.fixture(scope="module")
def vectors(
    serve_here: Callable[..., AbstractContextManager[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("vectors")
    model = make_tiny(folder / "embed", "BertModel")
    words = [model, "--served-model-name", "embed"]
    with serve_here(folder / "log", words) as url:
        yield url


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_runs(
    name: str, clients: Callable[[str], Path], chat: str, vectors: str
) -> None:
    script = HERE / f"with_{name}.py"
    run = subprocess.run(
        [clients(name), script, chat, vectors, TOOLS],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )
    assert run.returncode == 0, run.stderr[-3000:]


#: What programs without a library of their own send, by their documentation.
REQUESTS = json.loads((HERE / "requests.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("request_of", REQUESTS, ids=lambda request: request["program"])
def test_what_programs_send(request_of: dict[str, Any], chat: str) -> None:
    body = request_of["body"]
    with httpx.stream(
        "POST", chat + request_of["path"], json=body, timeout=300,
        headers={"Authorization": "Bearer none"},
    ) as answer:  # fmt: skip
        text = answer.read().decode()
    assert answer.status_code == 200, text
    assert ("data: " in text) == bool(body.get("stream"))
