"""What the kernels run on, as Triton tells it."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from importlib.util import find_spec

import torch

__all__ = ["fp8_products", "interpreting", "target", "unusable", "version"]

#: The oldest NVIDIA GPUs that Triton compiles for.
_CUDA_SINCE = 80
#: Those that multiply fp8 as it is stored in files: chips with another fp8 (fnuz) do not count.
_CUDA_FP8_SINCE, _OTHERS_WITH_FP8 = 89, (("hip", "gfx950"), ("hip", "gfx1200"), ("hip", "gfx1201"))
#: What brings the module, depending on the torch that it belongs to.
_DISTRIBUTIONS = (
    "triton",
    "triton-rocm",
    "triton-xpu",
    "pytorch-triton-rocm",
    "pytorch-triton-xpu",
)
_INSTALL = "install triton in the version that this torch names"


def version() -> str:
    """Triton's version; "" where it is not installed."""
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
    """(backend, architecture) that kernels are compiled for: ("cuda", "90"), ("hip", "gfx942"),
    ("xpu", ..); ("interpreter", "") where they are interpreted.
    """
    if interpreting():
        return "interpreter", ""
    from triton.runtime import driver

    found = driver.active.get_current_target()
    return str(found.backend), str(found.arch)


def unusable(device: torch.device) -> str | None:
    """Why kernels cannot run on a device here, None if they can."""
    if find_spec("triton") is None:
        return f"Triton is not installed: {_INSTALL}"
    try:
        if interpreting():
            return None
        if device.type == "cpu":
            return "needs a GPU; TRITON_INTERPRET=1 runs kernels slowly on processors, for tests"
        backend, architecture = target()
    except (ImportError, OSError, RuntimeError) as error:
        return f"Triton does not work here: {str(error).splitlines()[0]}"
    if backend == "cuda" and int(architecture) < _CUDA_SINCE:
        found, since = int(architecture) / 10, _CUDA_SINCE / 10
        return f"Triton needs a GPU of capability {since}, this one has {found}"
    return None


@cache
def fp8_products() -> bool:
    """Whether the device multiplies floats of eight bits (e4m3fn) itself."""
    backend, architecture = target()
    if backend == "cuda":
        return int(architecture) >= _CUDA_FP8_SINCE
    return backend == "interpreter" or (backend, architecture) in _OTHERS_WITH_FP8
