"""The Triton kernels as a provider for the core's op table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import modulm_kernels_triton
from modulm.contracts.kernels import KernelProvider, Op
from modulm.contracts.platform import Platform, Probe
from modulm_kernels_triton.device import interpreting, unusable, version
from modulm_kernels_triton.kept import keep_compiled

__all__ = ["TritonKernels"]

_DTYPES = ("bfloat16", "float16", "float32")


class TritonKernels(KernelProvider):
    """Kernels that are compiled for the device on first use and cached on disk."""

    name = "triton"
    api = 1

    @classmethod
    def probe(cls, platform: Platform) -> Probe:
        reason = unusable(platform.device)
        if reason is not None:
            return Probe(0, reason)
        if interpreting():
            return Probe(1, f"Triton {version()} interprets its kernels, for tests")
        return Probe(2, f"kernels compiled by Triton {version()}")

    def ops(self) -> Mapping[str, Op]:
        keep_compiled()
        return modulm_kernels_triton.ops()

    def rejects(self, op: str, **facts: Any) -> str | None:
        dtype = facts.get("dtype")
        if dtype is not None and dtype not in _DTYPES:
            return f"{op} does not support {dtype}"
        if dtype == "bfloat16" and interpreting():
            return "Triton's interpreter gives wrong products in bfloat16"
        return None
