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
        300, "Maximum time that a rank waits for the others.", unit="seconds", least=1
    )
    disable_custom_all_reduce: bool = flag(
        False, "Sum over GPUs with NCCL instead of kernels that read the memory of the other GPUs.",
    )  # fmt: skip
    worker_timeout: int = flag(
        300, "Time after which the workers of a step count as hung; 0: no limit.",
        unit="seconds", least=0,
    )  # fmt: skip
    enable_eplb: bool = flag(
        False, "Replicate experts that many tokens choose, and move experts between ranks when "
               "the load changes. Requires --enable-expert-parallel and several ranks.",
    )  # fmt: skip
    eplb_config: Mapping[str, Any] = flag(
        {}, "Options of --enable-eplb, with defaults: `window_size` (1000), steps over which "
            "load is measured; `step_interval` (3000), steps between moves; "
            "`num_redundant_experts` (0), copies on all ranks together; `log_balancedness` "
            "(false).",
    )  # fmt: skip
