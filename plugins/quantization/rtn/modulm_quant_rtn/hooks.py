"""The hook: beside each method that can round stacks of experts, one that rounds nothing else."""

from __future__ import annotations

from modulm.plugins import Declaration, hookimpl

__all__ = ["modulm_quantization"]

_METHODS = {"int8": "ExpertsInt8", "int4": "ExpertsInt4"}


@hookimpl
def modulm_quantization() -> list[Declaration]:
    """`experts_int8` and `experts_int4`."""
    return [
        Declaration(f"experts_{form}", f"modulm_quant_rtn.methods:{method}")
        for form, method in _METHODS.items()
    ]
