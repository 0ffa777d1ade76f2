"""The script that measures a GPU, dry: every section on tiny shapes, without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> None:
    done = subprocess.run(
        command, check=False, capture_output=True, text=True,
        env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.exhaustive
def test_the_script_finds_what_it_needs(tmp_path) -> None:
    script = str(ROOT / "bench/gpu/run.sh")
    run(script, "--dry-run", "--sections", "machine,idle", "--out", str(tmp_path))
    assert "nothing ran on hardware" in (tmp_path / "dry-run.txt").read_text()


@pytest.mark.exhaustive
def test_the_dry_run_passes(tmp_path) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'bench/gpu')!r}]\n"
        "from tests.plugins.kernels.triton.quick import quicken\n"
        "quicken()\n"
        f"sys.argv[1:] = ['--dry-run', '--out', {str(tmp_path)!r}]\n"
        f"runpy.run_path({str(ROOT / 'bench/gpu/measure.py')!r}, run_name='__main__')\n"
    )
    (tmp_path / "quick.py").write_text(code)
    run(sys.executable, str(tmp_path / "quick.py"))
    report = json.loads((tmp_path / "dry-run.json").read_text())
    assert report["machine"] == "dry run: nothing ran on hardware"
    assert all(section["ended"] == "done" for section in report["sections"].values())
    assert all(section["lines"] for section in report["sections"].values())
    assert list(report["sections"]) == [
        "machine", "kernels", "families", "graphs", "adapters", "streams", "attention",
        "low_precision", "sums", "decode", "throughput", "idle", "cold",
    ]  # fmt: skip


@pytest.mark.exhaustive
def test_a_section_that_fails_or_hangs_leaves_the_others(tmp_path) -> None:
    code = (
        "import sys, time\n"
        f"sys.path.insert(0, {str(ROOT / 'bench/gpu')!r})\n"
        "import measure\n"
        "from pathlib import Path\n"
        "def fails(setup):\n"
        "    setup.line('before', 1, 'things')\n"
        "    raise ValueError('broken')\n"
        "def hangs(setup): time.sleep(60)\n"
        "def works(setup): setup.line('speed', 2, 'tokens/s')\n"
        "measure.SECTIONS = {fails: 5, hangs: 0.2, works: 5}\n"
        f"place = Path({str(tmp_path)!r})\n"
        "setup = measure.Setup('cuda', True, place)\n"
        "measure.run(setup, ['fails', 'hangs', 'works'], 100, place / 'some')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    sections = json.loads((tmp_path / "some.json").read_text())["sections"]
    assert sections["fails"]["ended"] == "ValueError: broken"
    assert sections["fails"]["lines"][0]["what"] == "before"
    assert sections["hangs"]["ended"].startswith("TooLong")
    assert sections["works"]["ended"] == "done"
