"""AMD's GPUs, which torch drives by the names of CUDA where it is built for HIP.

Not run on hardware: written to what torch and AMD document, tested against a fake driver.
"""

from __future__ import annotations

from modulm_gpu.platform import GpuPlatform
from modulm_gpu.runtime import Runtime

__all__ = ["RocmPlatform"]

#: Families of chips by the start of their name, as LLVM calls them, and their floats of 8 bits:
#: MI300 multiplies those whose only zero is +0 (fnuz, one exponent lower); MI350 and the RDNA 4
#: generation those of the Open Compute Project.
_FP8 = (
    ("gfx950", "float8_e4m3fn"),
    ("gfx94", "float8_e4m3fnuz"),
    ("gfx12", "float8_e4m3fn"),
)
#: Compute chips (GCN, CDNA) run 64 threads in step, those for graphics (RDNA) 32.
_WIDE = "gfx9"
#: Chips before these multiply no bf16.
_NO_BF16 = ("gfx900", "gfx906", "gfx101", "gfx103")


class RocmPlatform(GpuPlatform):
    """The GPU that torch calls the current one in this process."""

    name = "rocm"
    api = 1
    attention = ("flash_attn", "triton", "sdpa")
    runtime = Runtime("cuda")
    vendor = "AMD"

    @classmethod
    def misses(cls) -> str | None:
        return None if cls.runtime.hip else "this torch is not built for AMD's GPUs"

    @property
    def chip(self) -> str:
        """What LLVM calls it, "gfx942", without the features behind it."""
        return str(self.runtime.properties().gcnArchName).partition(":")[0]

    @property
    def wave(self) -> int:
        """Threads that run in step."""
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
