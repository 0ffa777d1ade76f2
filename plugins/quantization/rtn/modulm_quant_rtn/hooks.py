"""Hook: for each method that can quantize experts, add one that quantizes only experts."""

from __future__ import annotations

from modulm.plugins import Declaration, hookimpl

__all__ = ["modulm_quantization"]

_METHODS = {"int8": "ExpertsInt8", "int4": "ExpertsInt4"}


@hookimpl
def modulm_quantization() -> list[Declaration]:
    """Declare `experts_int8` and `experts_int4`."""
    return [
        Declaration(f"experts_{form}", f"modulm_quant_rtn.methods:{method}")
        for form, method in _METHODS.items()
    ]
