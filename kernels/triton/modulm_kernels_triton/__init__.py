"""Triton kernels of modulm: one source for GPUs of NVIDIA, AMD and Intel.

There is one op per file, with a table `OPS`. `ops()` imports them all, and Triton; importing this
package imports neither. Whether a kernel is compiled or interpreted (`TRITON_INTERPRET=1`, on CPUs,
for tests) is decided when its file is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

__all__ = ["FILES", "ops"]

#: Files that define ops.
FILES = (
    "act_and_mul",
    "activate",
    "add_lora",
    "causal_conv",
    "delta_rule",
    "embedding",
    "fused_experts",
    "gated_rms_norm",
    "latent_prepare",
    "layer_norm",
    "linear",
    "moe_route",
    "rms_norm",
    "rms_norm_rounded",
    "rotary",
    "sampling",
    "selective_scan",
)


@cache
def ops() -> Mapping[str, Callable[..., Any]]:
    """Return op name -> callable on tensors; names as in the core's twins."""
    table: dict[str, Callable[..., Any]] = {}
    for name in FILES:
        table |= import_module(f"{__name__}.{name}").OPS
    return MappingProxyType(table)
