"""Intel's GPUs, through `torch.xpu` and the same Triton kernels.

Not run on hardware: written to what torch documents, tested against a fake driver.
"""

from __future__ import annotations

from modulm.contracts.platform import Memory
from modulm_gpu.platform import GpuPlatform
from modulm_gpu.runtime import Runtime

__all__ = ["XpuPlatform"]


class XpuPlatform(GpuPlatform):
    """The GPU that torch calls the current one in this process."""

    name = "xpu"
    api = 1
    attention = ("triton", "sdpa")
    runtime = Runtime("xpu")
    vendor = "Intel"

    def memory(self) -> Memory:
        """Some drivers do not tell what is free: then it is what torch does not hold."""
        try:
            return super().memory()
        except RuntimeError:
            total = int(self.runtime.properties().total_memory)
            held = int(self.runtime.module.memory_allocated(self.device))
            return Memory(total=total, free=total - held)

    @property
    def dtypes(self) -> tuple[str, ...]:
        if self.runtime.module.is_bf16_supported():
            return ("bfloat16", "float16", "float32")
        return ("float16", "float32")
