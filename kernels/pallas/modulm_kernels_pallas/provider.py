"""The Pallas kernels as a provider for the core's op table."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

from modulm.contracts.kernels import KernelProvider, Op
from modulm.contracts.platform import Platform, Probe

__all__ = ["TRACED", "PallasKernels"]

#: Ops that import JAX when they are called, not when they are bound: a process that estimates
#: memory binds them as well, and must leave the chips to the worker.
TRACED = (
    "add_lora", "argmax", "causal_conv", "delta_rule", "fused_experts", "pack_experts", "sample",
    "selective_scan",
)  # fmt: skip


class PallasKernels(KernelProvider):
    """Ops for programs that JAX compiles. Only a platform that declares "jax" has those."""

    name = "pallas"
    api = 1

    @classmethod
    def probe(cls, platform: Platform) -> Probe:
        if "jax" not in platform.capabilities:
            return Probe(0, "runs in programs of JAX only")
        if find_spec("jax") is None or find_spec("torchax") is None:
            return Probe(0, "JAX or torchax is not installed")
        return Probe(1, "JAX compiles the kernels")

    def ops(self) -> Mapping[str, Op]:
        from modulm_kernels_pallas import codes

        return {**codes.OPS, **{name: partial(_call, name) for name in TRACED}}


def _call(name: str, *arguments: Any, **options: Any) -> Any:
    """Call an op of `modulm_kernels_pallas.ops`. Importing it takes the chips."""
    from modulm_kernels_pallas.ops import OPS

    return OPS[name](*arguments, **options)
