"""The device that kernels run on, according to Triton."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from importlib.util import find_spec

import torch

__all__ = [
    "SCALED", "fp8_products", "interpreting", "low_precision", "scaled_products", "target",
    "unusable", "version",
]  # fmt: skip

#: Lowest compute capability that Triton supports.
_CUDA_SINCE = 80
#: Architectures that multiply fp8 in the checkpoint format (e4m3fn); chips with fnuz formats do not
#: count.
_CUDA_FP8_SINCE, _OTHERS_WITH_FP8 = 89, (("hip", "gfx950"), ("hip", "gfx1200"), ("hip", "gfx1201"))
#: Formats whose blocks of inputs have scales that hardware multiplies, and the devices that do:
#: compute capabilities from ... on, architectures of other backends.
SCALED = ("mxfp8", "mxfp4", "nvfp4")
_CUDA_SCALED_SINCE, _OTHERS_SCALED = 100, {("hip", "gfx950"): ("mxfp8", "mxfp4")}
#: How to install Triton, which depends on the torch build.
_DISTRIBUTIONS = (
    "triton",
    "triton-rocm",
    "triton-xpu",
    "pytorch-triton-rocm",
    "pytorch-triton-xpu",
)
_INSTALL = "install triton in the version that this torch names"


def version() -> str:
    """Return Triton's version; "" if it is not installed."""
    for name in (
        "triton",
        "pytorch-triton-rocm",
        "triton-rocm",
        "pytorch-triton-xpu",
        "triton-xpu",
    ):
        try:
            return version_of(name)
        except PackageNotFoundError:
            continue
    return ""


def interpreting() -> bool:
    """Whether kernels that are imported now are interpreted instead of compiled."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


@cache
def target() -> tuple[str, str]:
    """Return (backend, architecture) that kernels are compiled for: ("cuda", "90"), ("hip",
    "gfx942"), ("xpu", ..); ("interpreter", "") if they are interpreted.
    """
    if interpreting():
        return "interpreter", ""
    from triton.runtime import driver

    current = driver.active.get_current_target()
    return str(current.backend), str(current.arch)


def unusable(device: torch.device) -> str | None:
    """Return the reason why kernels cannot run on a device, or None."""
    if find_spec("triton") is None:
        return f"Triton is not installed: {_INSTALL}"
    try:
        if interpreting():
            return None
        if device.type == "cpu":
            return "needs a GPU; TRITON_INTERPRET=1 runs kernels slowly on CPUs, for tests"
        backend, architecture = target()
    except (ImportError, OSError, RuntimeError) as error:
        return f"Triton does not work: {str(error).splitlines()[0]}"
    if backend == "cuda" and int(architecture) < _CUDA_SINCE:
        capability, since = int(architecture) / 10, _CUDA_SINCE / 10
        return f"Triton needs a GPU of compute capability {since}, but this one has {capability}"
    return None


@cache
def fp8_products() -> bool:
    """Whether the device multiplies 8-bit floats (e4m3fn) natively."""
    backend, architecture = target()
    if backend == "cuda":
        return int(architecture) >= _CUDA_FP8_SINCE
    return backend == "interpreter" or (backend, architecture) in _OTHERS_WITH_FP8


@cache
def scaled_products(name: str) -> bool:
    """Whether the device multiplies blocks with scales in the format `name`."""
    backend, architecture = target()
    if backend == "cuda":
        return int(architecture) >= _CUDA_SCALED_SINCE
    return name in _OTHERS_SCALED.get((backend, architecture), ())


def low_precision(name: str) -> bool | None:
    """The op `low_precision`: whether products with inputs quantized to `name` are fast.

    True: the hardware multiplies them. False: they are converted to 16 bits inside the kernel.
    None: no kernel multiplies them here. Names are those of `modulm_quantized.ACTIVATION_FORMATS`.
    """
    if name in SCALED:
        return interpreting() or scaled_products(name)
    if name.startswith("fp8"):
        return True if fp8_products() else None
    return True if name == "int8" else None
