"""Environments that hold nothing of this repository, and servers that run in them."""

from __future__ import annotations

import os
import shutil
import site
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest


def make_environment(place: Path, pip: bool) -> Path:
    """A fresh venv in `place`/venv that borrows the third-party packages of this one."""
    venv.create(place / "venv", symlinks=True, with_pip=pip)
    borrowed = place / "borrowed"
    borrowed.mkdir()
    for path in map(Path, site.getsitepackages()):
        for entry in path.iterdir():
            ours = entry.name.startswith(("modulm", "_modulm", "_editable", "__editable__", "pip"))
            if not ours and entry.suffix != ".pth" and not (borrowed / entry.name).exists():
                (borrowed / entry.name).symlink_to(entry)
    (packages,) = (place / "venv/lib").glob("python*/site-packages")
    for old in packages.glob("setuptools*"):  # Python 3.11's, too old for torch
        shutil.rmtree(old)
    (packages / "borrowed.pth").write_text(f"{borrowed}\n")
    return place


@pytest.fixture(scope="module")
def fresh_environment() -> Callable[[Path, bool], Path]:
    return make_environment


@contextmanager
def running(program: Path, log: Path, words: Sequence[object] = ()) -> Iterator[str]:
    """`modulm serve` of an environment: its URL while it is up. It has to end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [program, "serve", *map(str, words), "--port", str(port)], stdout=sink, stderr=sink,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=log.parent,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while not healthy(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield url
        process.terminate()
        assert process.wait(300) == 0
        # A fault that a sweep injects (tests/support/fault_sweep.py) is logged with its traceback.
        assert "MODULM_FAULTS" in os.environ or "Traceback" not in log.read_text()
    finally:
        process.kill()
        process.wait()


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


#: The command line of this environment.
MODULM = Path(sys.executable).with_name("modulm")


@pytest.fixture(scope="module")
def serve_here() -> Callable[..., AbstractContextManager[str]]:
    return partial(running, MODULM)


@pytest.fixture(scope="module")
def serve() -> Callable[..., AbstractContextManager[str]]:
    return running
