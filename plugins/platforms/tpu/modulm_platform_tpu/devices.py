"""Looks for TPUs. Imports neither torch nor JAX: every process asks when it starts."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from modulm.config.environ import variables

__all__ = ["look"]


def look() -> tuple[int, str]:
    """Return the platform's score, see `Probe`, and the reason."""
    on_cpu = variables().get("JAX_PLATFORMS") == "cpu"
    if not on_cpu and not any(Path("/dev").glob("accel*")):
        return 0, "this machine has no TPU"
    if find_spec("jax") is None or find_spec("torchax") is None:
        return 0, "JAX or torchax is not installed"
    if on_cpu:
        return 1, "JAX_PLATFORMS=cpu: JAX computes on processors"
    if find_spec("libtpu") is None:
        return 0, "libtpu is not installed"
    return 100, "there are TPU devices and libtpu"
