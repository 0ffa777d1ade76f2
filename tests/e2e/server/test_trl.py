"""TRL's GRPOTrainer with modulm in vLLM's place: the script of docs/reinforcement-learning.md."""

from __future__ import annotations

import os
import re
import site
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.exhaustive

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs/reinforcement-learning.md"
STEPS = 6


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[float]]:
    """Runs the script in an environment that has TRL and this one's packages; its rewards."""
    folder = tmp_path_factory.mktemp("trl")
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, "venv"], cwd=folder,
                   check=True)  # fmt: skip
    python = folder / "venv/bin/python"
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--python", python]
    subprocess.run([*install, "-r", HERE / "trl_requirements.txt"], check=True)
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    folders = "".join(
        f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()
    )
    (packages / "this_environment.pth").write_text(folders)
    (script,) = re.findall(r"^```py\n(# train\.py.*?)^```$", PAGE.read_text(), re.M | re.S)
    (folder / "train.py").write_text(script)

    def train(*arguments: str) -> list[float]:
        done = subprocess.run(
            [python, "train.py", *arguments], cwd=folder, capture_output=True, text=True,
            timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        (line,) = re.findall(r"^rewards (.*)$", done.stdout, re.M)
        return [float(reward) for reward in line.split()]

    return train


def test_colocate(trainer: Callable[..., list[float]]) -> None:
    rewards = trainer("colocate", str(STEPS))
    assert len(rewards) == STEPS
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.2


def test_server(
    trainer: Callable[..., list[float]],
    serve_here: Callable[..., AbstractContextManager[str]],
    tmp_path: Path,
) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    flags = ["demo", "--server-dev-mode", "--weight-transfer-config", '{"backend": "gloo"}',
             "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1",
             "--max-model-len", "128"]  # fmt: skip
    with serve_here(tmp_path / "log", flags) as url:
        rewards = trainer("server", str(STEPS), url, port)
        assert httpx.get(f"{url}/weight_info").json()["weight_version"] >= STEPS
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.2
