"""The flags of ranks that are processes, by vLLM's names where it has them."""

from __future__ import annotations

from modulm.config.schema.flags import FlagGroup, flag, flag_group

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
