"""The CPU kernels as a provider for the core's op table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import Attribute, field, frozen

import modulm_kernels_cpu
from modulm.contracts.kernels import Forward, KernelProvider, Op
from modulm.contracts.platform import Platform, Probe
from modulm_kernels_cpu import library
from modulm_kernels_cpu.replay import Replay

__all__ = ["CpuKernels", "CpuOptions"]

#: Ops on a cache in the kernels' layout, which the attention backend `cpu_paged` calls directly.
_PRIVATE = frozenset(
    {
        "write_kv",
        "plan_attention",
        "paged_attention",
        "qkv_prepare",
        "pick_tokens",
        "selected_attention",
    }
)
_DTYPES = frozenset({"bfloat16", "float16", "float32"})


def _check_level(options: CpuOptions, attribute: Attribute[Any], value: str | None) -> None:
    if value is not None:
        library.check(value)


@frozen
class CpuOptions:
    """`level`: the instruction set to use; None: the best one that this machine supports."""

    level: str | None = field(default=None, validator=_check_level)


class CpuKernels(KernelProvider):
    """The kernels of the best level that this CPU supports, or of the configured one.

    The level applies to the whole process, because attention calls the kernels without this table.
    """

    name = "cpu"
    api = 1
    Config = CpuOptions

    def __init__(self, options: CpuOptions | None = None) -> None:
        modulm_kernels_cpu.use(None if options is None else options.level)

    @classmethod
    def probe(cls, platform: Platform) -> Probe:
        if platform.device.type != "cpu":
            return Probe(0, "these kernels run on CPUs")
        best, runs = library.levels()[-1], library.runnable()[-1]
        unbuilt = "" if best == runs else f"; {runs} was not built: {library.BUILD_ALL}"
        return Probe(2, f"compiled kernels, level {best} at best{unbuilt}")

    def ops(self) -> Mapping[str, Op]:
        """The op table, with as many threads as torch uses."""
        modulm_kernels_cpu.set_threads(torch.get_num_threads())
        table = modulm_kernels_cpu.ops()
        return {name: op for name, op in table.items() if name not in _PRIVATE}

    def recorded(self, forward: Forward) -> Forward:
        return Replay(modulm_kernels_cpu.load(), forward)

    def rejects(self, op: str, **facts: Any) -> str | None:
        dtype = facts.get("dtype")
        return None if dtype is None or dtype in _DTYPES else f"{op} does not support {dtype}"
