"""The flag of products in low precision."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["LowPrecisionFlags"]


@flag_group
class LowPrecisionFlags(FlagGroup):
    """Whether layers of quantized models multiply in low precision."""

    title = "LowPrecision"

    activation_quantization: str = flag(
        "auto",
        "Whether layers quantize their inputs, to multiply in low precision (int8, fp8, fp4). "
        "auto: if the checkpoint's format says so and the device is faster that way. on: also if "
        "the device is slower. off: products in 16 bits.",
        choices=("auto", "on", "off"),
    )
