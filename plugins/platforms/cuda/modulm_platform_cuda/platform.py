"""NVIDIA GPUs through torch's own operations: the portable path, no kernels of our own yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from modulm.contracts.platform import Memory, Platform, Probe, Staging, Transfer
from modulm_platform_cuda.transfers import PinnedStaging, PinnedTransfer

__all__ = ["CudaPlatform"]

_BF16_SINCE = (8, 0)


class CudaPlatform(Platform):
    """The GPU that torch calls the current one in this process."""

    name = "cuda"
    api = 1
    attention = ("triton", "sdpa")
    kernels = ("triton",)
    capabilities = frozenset({"pin_memory"})
    queued = True
    batched_tokens = (16384, 8192)
    sequences = (1024, 256)

    @classmethod
    def probe(cls) -> Probe:
        try:
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        except RuntimeError as error:
            return Probe(0, f"torch cannot reach a GPU: {error}")
        if not count:
            return Probe(0, "torch sees no NVIDIA GPU")
        return Probe(100, f"torch sees {count} NVIDIA GPU{'s' * (count > 1)}")

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def memory(self) -> Memory:
        free, total = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return Memory(total=total, free=free + held)

    @property
    def dtypes(self) -> tuple[str, ...]:
        if torch.cuda.get_device_capability(self.device) >= _BF16_SINCE:
            return ("bfloat16", "float16", "float32")
        return ("float16", "float32")

    def start(self, *, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        torch.cuda.set_device(self.device)

    def staging(self) -> Staging:
        return PinnedStaging(self.device)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        return PinnedTransfer(tensors)

    def reset_peak_memory(self) -> int:
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def peak_memory(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def describe(self) -> str:
        properties = torch.cuda.get_device_properties(self.device)
        size = properties.total_memory / 2**30
        return (
            f"{properties.name}, {size:.0f} GiB, capability {properties.major}.{properties.minor}"
        )
