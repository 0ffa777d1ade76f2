"""Which attention backend and which kernels compute the layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["AttentionConfig"]


@flag_group
class AttentionConfig(FlagGroup):
    """Which attention backend and which kernels compute the layers."""

    title = "AttentionConfig"
    table = "attention_config"
    table_aliases = ("-ac",)

    attention_backend: str | None = flag(
        None, "Attention backend. Default: the platform's first that fits.", kind="attention",
        key="backend", common=True
    )  # fmt: skip
    attention_options: Mapping[str, Any] = flag(
        {}, "Options of the attention backend.", key="options"
    )
    kernels: tuple[str, ...] | None = flag(
        None,
        "Kernel providers in order of preference; none uses plain torch.",
        kind="kernels",
        choices=("none",),
    )
