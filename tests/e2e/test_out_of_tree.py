"""A stranger's model plugin: written by `modulm plugins new`, installed with pip's means into a
fresh environment beside modulm, and served over HTTP. No file of the core knows of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from modulm.testing.checkpoints import make_tiny

ROOT = Path(__file__).resolve().parents[2]
UV = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
NEEDED = ("platforms/cpu", "attention/sdpa", "quantization/none", "loaders/safetensors")
NEEDED += ("executors/uni", "schedulers/fcfs", "routes/openai", "routes/ops")
NEEDED += ("commands/plugins",)
UNUSED = {"ray-serve", "speculation"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(
    tmp_path_factory: pytest.TempPathFactory, fresh_environment: Callable[[Path, bool], Path]
) -> Path:
    """A fresh venv: third-party packages are borrowed from this one, everything of this
    repository that it needs is built into wheels and installed, the plugin too."""
    place = fresh_environment(tmp_path_factory.mktemp("fresh"), False)
    python = place / "venv/bin/python"
    run(sys.executable, "-m", "modulm.cli.main", "plugins", "new", "models", "stranger",
        "--into", str(place))  # fmt: skip
    libraries = [path.parent for path in ROOT.glob("core/*/*/pyproject.toml")]
    own = [str(ROOT), *(str(path) for path in libraries if path.name not in UNUSED)]
    own += [str(ROOT / "plugins" / name) for name in NEEDED]
    run(UV, "pip", "install", "--quiet", "--no-deps", "--offline", "--python", str(python),
        *own, str(place / "modulm-stranger"))  # fmt: skip
    return place


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_listed(environment: Path) -> None:
    listed = run(str(environment / "venv/bin/modulm"), "plugins", "list", "models", "--json")
    (found,) = json.loads(listed)
    assert found["name"] == "StrangerForCausalLM"
    assert found["distribution"] == "modulm-stranger"


def test_modulm_comes_from_the_fresh_environment(environment: Path) -> None:
    python = str(environment / "venv/bin/python")
    code = "from importlib.util import find_spec as f; "
    code += "print(f('modulm').origin, f('modulm_stranger').origin)"
    home = run(python, "-c", code)
    assert all(path.startswith(str(environment)) for path in home.split())


@pytest.fixture(scope="module")
def server(environment: Path, serve: Callable[..., AbstractContextManager[str]]) -> Iterator[str]:
    folder = make_tiny(environment / "checkpoint", "LlamaForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["StrangerForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    words = [folder, "--served-model-name", "stranger"]
    with serve(environment / "venv/bin/modulm", environment / "server.log", words) as url:
        yield url


@pytest.mark.exhaustive
def test_it_answers(server: str) -> None:
    body = {"model": "stranger", "prompt": "Hello", "max_tokens": 8, "temperature": 0}
    answers = [httpx.post(f"{server}/v1/completions", json=body, timeout=300) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    first, second = (answer.json()["choices"][0] for answer in answers)
    assert first["text"] == second["text"]
    assert answers[0].json()["usage"]["completion_tokens"] == 8
