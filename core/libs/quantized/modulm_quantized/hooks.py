"""Hook: norms quantize the inputs of the layers after them."""

from __future__ import annotations

from typing import Any

from modulm.plugins import hookimpl

__all__ = ["modulm_model_loaded"]


@hookimpl
def modulm_model_loaded(model: Any, config: Any) -> None:
    """Let norms quantize what layers read next, where a kernel does."""
    from torch.nn import Module

    from modulm_quantized.norms import fuse_norms

    if isinstance(model, Module):
        fuse_norms(model)
