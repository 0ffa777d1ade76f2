"""The CPU kernels for Arm, cross-compiled and run by QEMU, repeat calls recorded on this machine.

QEMU computes what the instructions are defined to; no time is measured. Needs Debian's
g++-aarch64-linux-gnu and qemu-user.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

from modulm_kernels_cpu.library import ARM

ROOT = Path(__file__).resolve().parents[4]
HERE = Path(__file__).parent
COMPILER, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
#: Level -> processor that has its instructions and not those of the next level.
PROCESSORS = {
    "scalar": "cortex-a53",
    "neon": "neoverse-n1",
    "neon_bf16": "max,sve=off",
    "sve256": "max,sve-max-vq=2",
}
TESTS = [
    f"tests/plugins/kernels/cpu/test_{name}.py"
    for name in (
        "linear", "elementwise", "attention", "moe", "recurrence", "latent", "lora", "sampling",
        "sparse_attention", "varlen_attention",
    )
]  # fmt: skip
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        not (which(COMPILER) and which(QEMU) and which("cmake")),
        reason="needs cmake; apt-get install g++-aarch64-linux-gnu qemu-user",
    ),
]


def run(*command: object, **options) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, cwd=ROOT,
        timeout=3000, **options,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """Calls that the kernels' own tests make here."""
    folder = tmp_path_factory.mktemp("calls")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    run(sys.executable, HERE / "record_calls.py", folder, *TESTS, env=environment)
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The libraries of all levels, and the program that repeats calls."""
    folder = tmp_path_factory.mktemp("build")
    source = ROOT / "kernels/cpu"
    run(
        "cmake", "-S", source, "-B", folder, "-DCMAKE_BUILD_TYPE=Release", "-DMODULM_LEVELS=all",
        f"-DCMAKE_TOOLCHAIN_FILE={source / 'cmake/aarch64.cmake'}",
    )  # fmt: skip
    run("cmake", "--build", folder, "-j", "2")
    run(COMPILER, "-O1", "-std=c++17", HERE / "replay_calls.cpp", "-o", folder / "replay", "-ldl")
    return folder


@pytest.mark.parametrize("level", ARM)
def test_calls_give_the_same_on_arm(built, recorded, level):
    said = run(
        QEMU, "-cpu", PROCESSORS[level], "-L", "/usr/aarch64-linux-gnu", built / "replay",
        built / f"libmodulm_cpu_{level}.so", level, recorded,
    )  # fmt: skip
    *_, last = said.splitlines()
    assert last.startswith(f"{level} (highest {ARM.index(level)}): ")
    calls, functions = int(last.split()[3]), int(last.split()[6])
    assert calls > 300, said
    assert functions > 25, said
