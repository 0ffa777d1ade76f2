"""Options of loads and of what is reported, from text to values."""

from __future__ import annotations

from typing import Any

import click

__all__ = ["metrics_of", "percentiles_of", "schedule_of"]


def metrics_of(text: str) -> list[str]:
    """Read --percentile-metrics. Raises click.UsageError."""
    from modulm_command_bench.figures import METRICS

    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise click.UsageError(f"--percentile-metrics {unknown[0]}: use {', '.join(METRICS)}")
    return names


def percentiles_of(text: str) -> list[float]:
    """Read --metric-percentiles. Raises click.UsageError."""
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise click.UsageError(f"--metric-percentiles {text}: write numbers, 50,99") from error
    if any(not 0 <= value <= 100 for value in values):
        raise click.UsageError(f"--metric-percentiles {text}: between 0 and 100")
    return values


def schedule_of(options: dict[str, Any]) -> Any:
    """Read the options of arrival times. Raises click.UsageError."""
    from modulm_command_bench.load import Schedule

    ramp, start, end = (
        options["ramp_up_strategy"], options["ramp_up_start_rps"], options["ramp_up_end_rps"],
    )  # fmt: skip
    if ramp is not None and not (start and end and start > 0 and end > 0):
        raise click.UsageError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if options["request_rate"] <= 0 or options["burstiness"] <= 0:
        raise click.UsageError("--request-rate and --burstiness are above 0")
    return Schedule(
        rate=options["request_rate"],
        burstiness=options["burstiness"],
        ramp=ramp,
        start_rate=start or 1.0,
        end_rate=end or 1.0,
        recorded=options["replay_times"] or options["dataset_name"] == "timed_trace",
        seed=options["seed"],
    )
