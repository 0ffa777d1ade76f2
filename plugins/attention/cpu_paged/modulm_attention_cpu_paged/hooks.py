"""Hook: choose this backend wherever it can run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modulm.plugins import Choice, hookimpl

if TYPE_CHECKING:
    from modulm.contracts.attention import AttentionSpec
    from modulm.contracts.kernels import Ops
    from modulm.contracts.platform import Platform

__all__ = ["modulm_choose_attention"]


@hookimpl(trylast=True)
def modulm_choose_attention(spec: AttentionSpec, platform: Platform, ops: Ops) -> Choice | None:
    """Prefer the compiled kernels to the platform's default order."""
    from modulm_attention_cpu_paged.backend import CpuPagedAttention

    if CpuPagedAttention.refuses(spec, platform, ops) is not None:
        return None
    return Choice("cpu_paged", "compiled kernels read the paged cache in place")
