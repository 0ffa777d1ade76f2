"""One short round of each fault of `bench/faults.py`, and of the soak, as anybody can run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from samples import parametrize_sample

BENCH = Path(__file__).resolve().parents[3] / "bench"

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="reads Linux' process table"
)


def run(*arguments: str) -> str:
    """The output of a benchmark that must say that all is well."""
    script, *more = arguments
    done = subprocess.run(
        [sys.executable, str(BENCH / script), *more],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@parametrize_sample("kind", ["disk", "kill", "clock", "stop"], every=4)
def test_nothing_that_was_acknowledged_is_lost(kind: str) -> None:
    output = run("faults.py", kind)
    if "skipped" in output:
        pytest.skip(output.strip())
    assert re.match(rf"{kind} +[0-9.]+ s  ", output), output


@pytest.mark.exhaustive
def test_many_slow_connections() -> None:
    output = run("faults.py", "slow", "--connections", "300")
    assert "300 slow connections" in output


@pytest.mark.exhaustive
def test_a_short_soak() -> None:
    """Too short to say whether memory grows; files, tasks and every answer are looked at."""
    output = run("soak.py", "--minutes", "0.05", "--flat", "1000", "--kills", "1")
    assert "nothing was lost" in output
    assert len(re.findall(r"^(chat|embed|media) .* -> ", output, re.MULTILINE)) == 3, output
