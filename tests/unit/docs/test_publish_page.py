"""The page about the path of a plugin is one script: a real index, and a second environment."""

from __future__ import annotations

import os
import re
import site
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[3] / "docs/publish-a-plugin.md"


@pytest.mark.exhaustive
def test_the_page_runs_from_new_to_upgrade(tmp_path: Path) -> None:
    bin_folder = Path(sys.executable).parent
    uv = bin_folder / "uv"
    elsewhere = tmp_path / "elsewhere"
    subprocess.run(
        [uv, "venv", "-q", "--offline", "--python", sys.executable, elsewhere], check=True
    )
    (packages,) = elsewhere.glob("lib/python*/site-packages")
    own = next(path for path in map(Path, site.getsitepackages()) if path.name == "site-packages")
    (packages / "first.pth").write_text(f"import site; site.addsitedir({str(own)!r})\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    script = "\n".join(["set -eu", "trap 'kill $(jobs -p)' EXIT", *blocks])
    env = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
           "UV_OFFLINE": "0", "OMP_NUM_THREADS": "1"}  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", script.replace("8765", str(port))],
        cwd=tmp_path, env=env, text=True, check=False, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "contract kit passed" in done.stdout
    assert "modulm-parser-brackets is 0.2.0, the lock has 0.1.0" in done.stdout
    assert re.search(r"modulm-parser-brackets +0\.2\.0 .*as installed", done.stdout)
    assert "modulm_parser_brackets-0.2.0-py3-none-any.whl" in (tmp_path / "index.log").read_text()
