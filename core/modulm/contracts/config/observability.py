"""Logs, metrics, traces and profiles of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["ObservabilityConfig"]


@flag_group
class ObservabilityConfig(FlagGroup):
    """Logs, metrics, traces and profiles of the engine."""

    title = "ObservabilityConfig"

    enable_log_requests: bool = flag(False, "Log each request's prompt and parameters.")
    disable_log_stats: bool = flag(False, "Do not log statistics every ten seconds.")
    log_level: str = flag(
        "info", "Minimum level of log lines.",
        choices=("trace", "debug", "info", "warning", "error", "critical"),
    )  # fmt: skip
    log_format: str = flag("text", "Format of log lines.", choices=("text", "json"))
    logging_config: Mapping[str, Any] | None = flag(None, "Python logging configuration, as JSON.")
    log_config_file: str | None = flag(
        None, "JSON file with a Python logging configuration.", unit="path"
    )
