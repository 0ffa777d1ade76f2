"""AMD GPUs, which a HIP build of torch exposes through `torch.cuda`.

Not run on hardware: written against the documentation of torch and AMD, and tested with a fake
driver.
"""

from __future__ import annotations

from modulm_gpu.platform import GpuPlatform
from modulm_gpu.runtime import Runtime

__all__ = ["RocmPlatform"]

#: Prefixes of LLVM's chip names and the 8-bit float format that the chips multiply: MI300 the fnuz
#: formats (no negative zero, exponent bias one higher); MI350 and RDNA 4 the formats of the Open
#: Compute Project.
_FP8 = (
    ("gfx950", "float8_e4m3fn"),
    ("gfx94", "float8_e4m3fnuz"),
    ("gfx12", "float8_e4m3fn"),
)
#: Wave size: compute chips (GCN, CDNA) run 64 threads in lockstep, graphics chips (RDNA) 32.
_WIDE = "gfx9"
#: Prefixes of older chips without bf16 arithmetic.
_NO_BF16 = ("gfx900", "gfx906", "gfx101", "gfx103")


class RocmPlatform(GpuPlatform):
    """The GPU that is torch's current device in this process."""

    name = "rocm"
    api = 1
    attention = ("flash_attn", "triton", "sdpa")
    collectives = ("symm_mem", "nccl")
    runtime = Runtime("cuda")
    vendor = "AMD"

    @classmethod
    def misses(cls) -> str | None:
        return None if cls.runtime.hip else "this torch is not built for AMD GPUs"

    @property
    def chip(self) -> str:
        """LLVM's name of the chip, such as "gfx942", without feature suffixes."""
        return str(self.runtime.properties().gcnArchName).partition(":")[0]

    @property
    def wave(self) -> int:
        """The number of threads that run in lockstep."""
        return 64 if self.chip.startswith(_WIDE) else 32

    @property
    def dtypes(self) -> tuple[str, ...]:
        if self.chip.startswith(_NO_BF16):
            return ("float16", "float32")
        return ("bfloat16", "float16", "float32")

    @property
    def fp8(self) -> str | None:
        return next((dtype for start, dtype in _FP8 if self.chip.startswith(start)), None)

    def chip_abilities(self) -> frozenset[str]:
        return super().chip_abilities() | {f"wave{self.wave}"}

    def describe(self) -> str:
        return f"{super().describe()}, {self.chip}, waves of {self.wave}"
