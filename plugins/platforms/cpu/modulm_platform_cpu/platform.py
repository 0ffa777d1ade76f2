"""The CPU platform: always available, with the lowest score."""

from __future__ import annotations

import math
import os
import platform as host
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from modulm.contracts.platform import Binding, Memory, Platform, Probe, Staging, Transfer
from modulm_platform_cpu.memory import (
    give_back,
    keep_freed_memory,
    lazy_zeros,
    read_memory,
)
from modulm_platform_cpu.nodes import bind, read_nodes, settle

__all__ = ["CpuPlatform"]


class _Views(Staging):
    """Tensors are views of the arrays."""

    def send(self, arrays: Sequence[np.ndarray]) -> tuple[torch.Tensor, ...]:
        return tuple([torch.from_numpy(array) for array in arrays])


class _Values(Transfer):
    """Values that are in host memory already."""

    def wait(self) -> tuple[np.ndarray, ...]:
        return tuple([tensor.numpy() for tensor in self._tensors])


#: Flags in /proc/cpuinfo ("flags" on x86, "Features" on Arm) of bf16 and fp16 arithmetic.
_BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_FP16 = frozenset({"avx512_fp16", "amx_fp16", "asimdhp"})
_SHOWN = ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512f", "avx2", "bf16", "i8mm", "sve")


class CpuPlatform(Platform):
    """The CPU cores that this process may use."""

    name = "cpu"
    api = 1
    attention = ("sdpa",)
    kernels = ("cpu", "onednn")
    batched_tokens = (4096, 2048)
    sequences = (256, 128)
    block_size = 32
    drafts = True
    no_effect = dict.fromkeys(
        (
            "optimization_level",
            "cudagraph_mode",
            "cudagraph_capture_sizes",
            "max_cudagraph_capture_size",
            "compile_mode",
            "compile_backend",
        ),
        "CUDA graphs need a GPU; CPU kernels replay recorded steps instead, see --enforce-eager",
    )
    collectives = ("cpu", "gloo")

    _ranks = 1

    @classmethod
    def probe(cls) -> Probe:
        return Probe(1, "every machine has a CPU")

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def memory(self) -> Memory:
        return self.memory_per_worker(self._ranks)

    def memory_per_worker(self, workers: int) -> Memory:
        machine = read_memory()
        return Memory(total=machine.total // workers, free=machine.free // workers)

    @cached_property
    def features(self) -> frozenset[str]:
        """Instruction sets by Linux's names; empty if it does not report them."""
        for line in self._cpuinfo:
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                return frozenset(value.split())
        return frozenset()

    @cached_property
    def dtypes(self) -> tuple[str, ...]:  # type: ignore[override]
        names = ["bfloat16", "float32"] if self.features & _BF16 else ["float32", "bfloat16"]
        return (*names, "float16")

    def choose_dtype(self, stored: str) -> str:
        """fp16 is slow in torch without fp16 instructions: use bf16 if supported, else fp32."""
        if stored == "float16" and not self.features & _FP16:
            return self.dtypes[0]
        return super().choose_dtype(stored)

    def take_share(self, rank: int, ranks: int) -> None:
        """Take an equal share of the cores and of the memory for each rank."""
        cpus = sorted(os.sched_getaffinity(0))
        each = len(cpus) // ranks
        if each:
            os.sched_setaffinity(0, cpus[rank * each : (rank + 1) * each])
        self._ranks = ranks

    def bind(self, binding: Binding) -> None:
        bind(settle(binding, read_nodes(), frozenset(os.sched_getaffinity(0))))

    def start(self, *, threads: int | None = None) -> None:
        torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
        keep_freed_memory()

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate pages that the system provides when they are first touched, or shortly before:
        startup does not wait for the whole cache, and unused memory is not taken.
        """
        size = math.prod(shape) * dtype.itemsize
        return lazy_zeros(size).view(dtype).view(tuple(shape))

    def staging(self) -> Staging:
        return _Views(self.device)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        return _Values(tensors)

    def empty_cache(self) -> None:
        give_back()

    def describe(self) -> str:
        sets = [name for name in _SHOWN if name in self.features]
        size, cores = self.memory().total / 2**30, len(os.sched_getaffinity(0))
        return f"{self._model}, {cores} cores, {size:.0f} GiB, {' '.join(sets)}"

    @property
    def _model(self) -> str:
        for line in self._cpuinfo:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
        return host.machine()

    @cached_property
    def _cpuinfo(self) -> list[str]:
        file = Path("/proc/cpuinfo")
        return file.read_text().splitlines() if file.exists() else []
