"""NVIDIA GPUs."""

from __future__ import annotations

from modulm_gpu.platform import GpuPlatform
from modulm_gpu.runtime import Runtime

__all__ = ["CudaPlatform"]

#: Lowest compute capabilities with hardware support for these dtypes.
_BF16_SINCE = (8, 0)
_FP8_SINCE = (8, 9)


class CudaPlatform(GpuPlatform):
    """The GPU that is torch's current CUDA device in this process."""

    name = "cuda"
    api = 1
    attention = ("flash_attn", "flashinfer", "triton", "sdpa")
    collectives = ("symm_mem", "nccl")
    runtime = Runtime("cuda")
    vendor = "NVIDIA"

    @classmethod
    def misses(cls) -> str | None:
        return "this torch is built for AMD GPUs" if cls.runtime.hip else None

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability, (9, 0) for Hopper."""
        properties = self.runtime.properties()
        return int(properties.major), int(properties.minor)

    @property
    def dtypes(self) -> tuple[str, ...]:
        if self.capability >= _BF16_SINCE:
            return ("bfloat16", "float16", "float32")
        return ("float16", "float32")

    @property
    def fp8(self) -> str | None:
        return "float8_e4m3fn" if self.capability >= _FP8_SINCE else None

    def chip_abilities(self) -> frozenset[str]:
        major, minor = self.capability
        return super().chip_abilities() | {f"sm{major}{minor}"}

    def describe(self) -> str:
        major, minor = self.capability
        return f"{super().describe()}, capability {major}.{minor}"
