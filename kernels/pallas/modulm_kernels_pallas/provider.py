"""The Pallas kernels as a provider for the core's op table."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from modulm.contracts.kernels import KernelProvider, Op
from modulm.contracts.platform import Platform, Probe

__all__ = ["PallasKernels"]


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
        from modulm_kernels_pallas.ops import OPS

        return OPS
