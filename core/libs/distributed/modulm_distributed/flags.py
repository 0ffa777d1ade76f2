"""Flags of ranks, with vLLM's names where it has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["DistributedConfig"]


@flag_group
class DistributedConfig(FlagGroup):
    """Ranks that compute one model together."""

    title = "DistributedConfig"

    distributed_timeout_seconds: int = flag(
        300, "How long a rank waits for the others.", unit="seconds", least=1
    )
    worker_timeout: int = flag(
        300, "How long a step may take before its workers count as hung; 0: for ever.",
        unit="seconds", least=0,
    )  # fmt: skip
    enable_eplb: bool = flag(
        False, "Hold experts that many tokens choose more than once, and move experts between "
        "ranks as that changes; needs --enable-expert-parallel and several ranks.",
    )  # fmt: skip
    eplb_config: Mapping[str, Any] = flag(
        {}, "How: `window_size` (1000), steps whose tokens count; `step_interval` (3000), steps "
        "between two moves; `num_redundant_experts` (0), copies on all ranks together; "
        "`log_balancedness` (false).",
    )  # fmt: skip
