"""A platform whose only kernels are Triton's."""

from __future__ import annotations

from typing import ClassVar

import torch

from modulm.plugins import manager

__all__ = ["triton_platform"]


def triton_platform(*dtypes: str):
    """The GPU's platform, or processors that interpret the kernels; with these dtypes."""
    name = "cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else "cpu"
    base = manager.current().load("platforms", name)

    class OnTriton(base):
        kernels: ClassVar = ("triton",)
        attention: ClassVar = ("triton",)

        @property
        def dtypes(self):
            return dtypes

    return OnTriton()
