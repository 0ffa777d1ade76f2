"""The kernels run in Pallas' interpreter on the CPU, and are lowered for TPUs without running."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # of compiling, which takes longest

if find_spec("jax") is None:
    pytest.skip("JAX is not installed; make setup installs it", allow_module_level=True)
