"""Kernels that the interpreter takes are also compiled, for a GPU that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

SCRIPT = """
import sys
from types import SimpleNamespace
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device=0: 0,
))
from modulm_kernels_triton.kinds import KINDS
from modulm_kernels_triton.launch import compiling_only

with compiling_only() as made:
    for kind in KINDS:
        kind(SimpleNamespace(hidden=256, intermediate=384, dtype=torch.bfloat16))
for kernel in made:
    print(kernel.metadata.name, kernel.metadata.shared)
"""
#: Bytes that programs of one multiprocessor of the target share.
SHARED = 227 * 1024


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_are_compiled_for_hopper(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = dict(line.split() for line in done.stdout.splitlines())
    wanted = {
        "_add_up", "_argmax", "_bar", "_by_segment", "_by_token", "_causal_conv", "_count", "_down",
        "_experts", "_filter", "_invert", "_keep_inputs", "_linear", "_measure", "_moe_route",
        "_penalise", "_place", "_round", "_sample", "_up",
    }  # fmt: skip
    assert wanted <= set(kernels)
    assert max(map(int, kernels.values())) <= SHARED
