"""Intel GPUs, through `torch.xpu` and the same Triton kernels.

Not run on hardware: written against torch's documentation and tested with a fake driver.
"""

from __future__ import annotations

from modulm.contracts.platform import Memory
from modulm_gpu.platform import GpuPlatform
from modulm_gpu.runtime import Runtime

__all__ = ["XpuPlatform"]


class XpuPlatform(GpuPlatform):
    """The GPU that is torch's current XPU device in this process."""

    name = "xpu"
    api = 1
    attention = ("triton", "sdpa")
    runtime = Runtime("xpu")
    vendor = "Intel"

    def memory(self) -> Memory:
        """Total and free bytes; if the driver does not say, free is what torch has not
        allocated.
        """
        try:
            return super().memory()
        except RuntimeError:
            total = int(self.runtime.properties().total_memory)
            allocated = int(self.runtime.module.memory_allocated(self.device))
            return Memory(total=total, free=total - allocated)

    @property
    def dtypes(self) -> tuple[str, ...]:
        if self.runtime.module.is_bf16_supported():
            return ("bfloat16", "float16", "float32")
        return ("float16", "float32")
