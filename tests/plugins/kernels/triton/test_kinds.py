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
from triton.runtime.jit import JITFunction
from modulm_kernels_triton.kinds import KINDS
from modulm_kernels_triton.launch import compiling_only

calls, compiled = [], JITFunction.warmup
JITFunction.warmup = lambda kernel, *args, **options: calls.append((kernel, args, options))
with compiling_only():
    for kind in KINDS:
        kind(SimpleNamespace(hidden=256, intermediate=384, dtype=torch.bfloat16))
if "--everything" not in sys.argv:
    # Of the calls of a kernel the last has the most rows, so the largest tiles.
    calls = {id(call[0]): call for call in calls}.values()
for kernel, args, options in calls:
    made = compiled(kernel, *args, **options)
    print(made.metadata.name, made.metadata.shared)
"""
#: Bytes that programs of one multiprocessor of the target share.
SHARED = 227 * 1024


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_are_compiled_for_hopper(tmp_path, request):
    """One variant of each kernel; `make test-all` compiles all."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", SCRIPT]
    if request.config.getoption("--everything"):
        command.append("--everything")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [line.split() for line in done.stdout.splitlines()]
    wanted = {
        "_add_up", "_argmax", "_bar", "_by_scan", "_by_segment", "_by_token", "_causal_conv",
        "_count", "_down",
        "_experts", "_filter", "_invert", "_keep_inputs", "_linear", "_measure", "_moe_route",
        "_penalise", "_place", "_rms_norm_blocks", "_rms_norm_rounded", "_round", "_sample", "_up",
    }  # fmt: skip
    assert wanted <= {name for name, _ in kernels}
    assert max(int(shared) for _, shared in kernels) <= SHARED
