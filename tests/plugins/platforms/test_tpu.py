"""The TPU platform and the Pallas kernels are tested in a process of their own.

torchax registers a device with torch, which cannot be undone, and JAX starts threads, after which a
process should not be forked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PLUGINS = Path(__file__).resolve().parents[1]
CHECKS = [*sorted(PLUGINS.glob("kernels/pallas/*_checks.py")), PLUGINS / "platforms/tpu_checks.py"]


@pytest.mark.skipif(
    find_spec("jax") is None or find_spec("torchax") is None,
    reason="JAX is not installed; make setup installs it",
)
def test_tpus(pytestconfig: pytest.Config) -> None:
    everything = ["--everything"] if pytestconfig.getoption("everything") else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *everything, *CHECKS],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        },
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
    assert " passed" in done.stdout
