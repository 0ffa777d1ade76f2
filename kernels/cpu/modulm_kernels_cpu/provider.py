"""The kernels as a provider for the core's op table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import modulm_kernels_cpu
from modulm.contracts.kernels import Forward, KernelProvider, Op
from modulm.contracts.platform import Platform, Probe
from modulm_kernels_cpu.replay import Replay

__all__ = ["CpuKernels"]

#: Ops on a cache in the kernels' own layout: the attention backend `cpu_paged` calls them itself.
_PRIVATE = frozenset({"write_kv", "plan_attention", "paged_attention", "qkv_prepare"})
_DTYPES = frozenset({"bfloat16", "float16", "float32"})


class CpuKernels(KernelProvider):
    """The best level that this processor runs."""

    name = "cpu"
    api = 1

    @classmethod
    def probe(cls, platform: Platform) -> Probe:
        if platform.device.type != "cpu":
            return Probe(0, "these kernels run on CPUs")
        return Probe(2, f"compiled kernels, level {modulm_kernels_cpu.load().level}")

    def ops(self) -> Mapping[str, Op]:
        """The table, with as many threads as torch was given."""
        modulm_kernels_cpu.set_threads(torch.get_num_threads())
        table = modulm_kernels_cpu.ops()
        return {name: op for name, op in table.items() if name not in _PRIVATE}

    def recorded(self, forward: Forward) -> Forward:
        return Replay(modulm_kernels_cpu.load(), forward)

    def rejects(self, op: str, **facts: Any) -> str | None:
        dtype = facts.get("dtype")
        return None if dtype is None or dtype in _DTYPES else f"there is no {op} in {dtype}"
