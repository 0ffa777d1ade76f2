"""What the engine tells about itself: logs, metrics, traces, profiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.config.schema.flags import equip, flag, later, no_effect

__all__ = ["ObservabilityConfig"]

_TRACES = later("traces over OpenTelemetry")
_DEVICE_ONLY = no_effect("the platform in use has nothing to measure here")


@frozen(kw_only=True, field_transformer=equip)
class ObservabilityConfig:
    """What the engine tells about itself: logs, metrics, traces, profiles."""

    TITLE: ClassVar[str] = "ObservabilityConfig"
    TABLE: ClassVar[str | None] = None

    disable_log_stats: bool = flag(
        False,
        "Log no statistics while running.",
        state=no_effect("statistics are at /metrics and never logged"),
    )
    aggregate_engine_logging: bool = flag(
        False, "One line for all engines.", state=no_effect("there is one engine")
    )
    enable_log_requests: bool = flag(False, "Log each request's prompt and parameters.")
    disable_log_requests: bool = flag(
        True,
        "Log no requests.",
        deprecated="requests are not logged",
        state=no_effect("requests are not logged"),
    )
    log_level: str = flag(
        "info", "Least level of log lines.",
        choices=("trace", "debug", "info", "warning", "error", "critical"),
    )  # fmt: skip
    logging_config: Mapping[str, Any] | None = flag(None, "Python logging configuration, as JSON.")
    log_config_file: str | None = flag(
        None, "JSON file with a Python logging configuration.", unit="path"
    )
    show_hidden_metrics_for_version: str | None = flag(
        None,
        "Show metrics hidden since a version.",
        state=no_effect("no metric is hidden"),
    )
    otlp_traces_endpoint: str | None = flag(None, "Where traces are sent.", state=_TRACES)
    collect_detailed_traces: tuple[str, ...] | None = flag(
        None, "Parts that are traced in detail.", state=_TRACES
    )
    kv_cache_metrics: bool = flag(
        False, "Measure the life of blocks.", state=later("block metrics")
    )
    kv_cache_metrics_sample: float = flag(
        0.01, "Share of blocks that is measured.", unit="fraction", least=0, most=1,
        state=later("block metrics"),
    )  # fmt: skip
    custom_histogram_buckets: Mapping[str, Any] | None = flag(
        None, "Bounds of metrics' histograms, by name.", state=later("custom histogram bounds")
    )
    per_request_spec_decode_metrics: str = flag(
        "none", "Guessed tokens per request.", state=later("guessing tokens ahead")
    )
    cudagraph_metrics: bool = flag(False, "Count captured graphs.", state=_DEVICE_ONLY)
    enable_layerwise_nvtx_tracing: bool = flag(
        False, "Mark layers for a profiler.", state=_DEVICE_ONLY
    )
    jit_monitor_mode: str = flag("warn", "What to do on a late compile.", state=_DEVICE_ONLY)
    jit_monitor_verbose: bool = flag(False, "Say which kernel it was.", state=_DEVICE_ONLY)
    enable_mfu_metrics: bool = flag(
        False, "Measure the share of the machine's rate.", state=later("utilization metrics")
    )
    enable_logging_iteration_details: bool = flag(
        False, "Log every step.", state=later("logs of every step")
    )
    profiler_config: Mapping[str, Any] = flag(
        {}, "Profiler behind /start_profile.", state=later("profiles on request")
    )
    watchdog_config: Mapping[str, Any] = flag(
        {}, "Dump what hangs.", state=later("a watchdog over steps")
    )
