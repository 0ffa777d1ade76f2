"""Plots results of several runs: throughput and latency over concurrency or rate."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from modulm.plugins.index import to_install

__all__ = ["frontier", "pareto_point", "plot", "plot_pareto", "read_results"]

#: Colours that are distinct in print and for colour-blind readers (Okabe and Ito, 2008).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
#: Metric -> title of its panel.
_TIMES = {"ttft": "time to first token", "tpot": "time per output token", "e2el": "whole request"}
_PERCENTILE = re.compile(r"p([\d.]+)_(\w+)_ms")
#: Ratio of largest to smallest value above which an axis is logarithmic.
_WIDE = 20


def read_results(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Read results from files with one JSON object, or one per line."""
    results: list[dict[str, Any]] = []
    for path in paths:
        text = Path(path).read_text(encoding="utf-8")
        try:
            results.append(json.loads(text))
        except json.JSONDecodeError:
            try:
                results += [json.loads(line) for line in text.splitlines() if line.strip()]
            except json.JSONDecodeError as error:
                raise click.UsageError(f"{path} contains no results: {error}") from error
    return results


def plot(results: Sequence[Mapping[str, Any]], path: str) -> None:
    """Write a PNG: output tokens per second and each measured time, by label.

    Times are medians with a band up to the highest percentile in the results. Raises
    click.ClickException without matplotlib, click.UsageError for results without a common axis.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise click.ClickException(
            "plots need matplotlib" + to_install("modulm-command-bench[plot]")
        ) from error
    across = _axis(results)
    measured = [m for m in _TIMES if all(f"median_{m}_ms" in result for result in results)]
    picture = Figure(figsize=(4.2 * (1 + len(measured)), 3.8), layout="constrained")
    panels = picture.subplots(1, 1 + len(measured), squeeze=False)[0]
    labels = list(dict.fromkeys(str(result.get("label", "")) for result in results))
    for index, label in enumerate(labels):
        series = [result for result in results if str(result.get("label", "")) == label]
        series.sort(key=lambda result: float(result[across]))
        style = {"color": _COLOURS[index % len(_COLOURS)], "label": label}
        x_values = [float(result[across]) for result in series]
        panels[0].plot(x_values, [r["output_throughput"] for r in series], "o-", ms=4, **style)
        for metric, panel in zip(measured, panels[1:], strict=True):
            _times(panel, x_values, series, metric, style)
    panels[0].set_title("output tokens per second")
    for metric, panel in zip(measured, panels[1:], strict=True):
        top = _highest(results, metric)
        band = f", median to p{top}" if top else ", median"
        panel.set_title(f"{_TIMES[metric]}{band} (ms)")
    for panel in panels:
        _dress(panel, across, [float(result[across]) for result in results])
    if len(labels) > 1 or labels != [""]:
        panels[0].legend(frameon=False)
    picture.savefig(path, dpi=150)


def plot_pareto(results: Sequence[Mapping[str, Any]], path: str, devices: int) -> None:
    """Write a PNG: output tokens per second of a device over those of a user, by label, with a line
    through the results that no other one beats in both.

    devices: of the server, unless a result's metadata has them. Raises click.ClickException without
    matplotlib, click.UsageError for results without a number of users.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise click.ClickException(
            "plots need matplotlib" + to_install("modulm-command-bench[plot]")
        ) from error
    picture = Figure(figsize=(6.4, 4.6), layout="constrained")
    panel = picture.subplots()
    for index, label in enumerate(dict.fromkeys(str(r.get("label", "")) for r in results)):
        series = [result for result in results if str(result.get("label", "")) == label]
        points = [pareto_point(result, devices) for result in series]
        colour = _COLOURS[index % len(_COLOURS)]
        panel.plot(*zip(*points, strict=True), "o", ms=4, color=colour, alpha=0.5)
        best = frontier(points)
        panel.plot(*zip(*best, strict=True), "o-", ms=5, color=colour, label=label)
    panel.set_xlabel("output tokens per second and user")
    panel.set_ylabel("output tokens per second and device")
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.25, lw=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    if any(result.get("label") for result in results):
        panel.legend(frameon=False)
    picture.savefig(path, dpi=150)


def pareto_point(result: Mapping[str, Any], devices: int) -> tuple[float, float]:
    """Return the output tokens per second of one user and of one device."""
    users = result.get("max_concurrency") or result.get("max_concurrent_requests")
    if not isinstance(users, int | float) or users <= 0:
        raise click.UsageError(
            "--pareto needs results of --max-concurrency, which says how many users there are"
        )
    output = float(result["output_throughput"])
    try:
        count = float(result.get("devices", devices))
    except (TypeError, ValueError) as error:
        raise click.UsageError(f"devices: {result['devices']!r} is not a number") from error
    return output / users, output / max(count, 1.0)


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other one beats in both dimensions, in order of the first."""
    best: list[tuple[float, float]] = []
    for point in sorted(set(points), key=lambda point: (-point[0], -point[1])):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best[::-1]


def _times(
    panel: Any,
    x_values: Sequence[float],
    series: Sequence[Mapping[str, Any]],
    metric: str,
    style: Mapping[str, Any],
) -> None:
    middle = [result[f"median_{metric}_ms"] for result in series]
    panel.plot(x_values, middle, "o-", ms=4, **style)
    top = _highest(series, metric)
    if top:
        high = [result[f"p{top}_{metric}_ms"] for result in series]
        panel.fill_between(x_values, middle, high, color=style["color"], alpha=0.15, lw=0)


def _highest(results: Sequence[Mapping[str, Any]], metric: str) -> str | None:
    """The highest percentile of a metric that all results have."""
    percentiles = [
        {m[1] for name in result if (m := _PERCENTILE.fullmatch(name)) and m[2] == metric}
        for result in results
    ]
    common = set.intersection(*percentiles) if percentiles else set()
    return max(common, key=float, default=None)


def _dress(panel: Any, across: str, x_values: Sequence[float]) -> None:
    """Style the axes; a wide range of loads is logarithmic, with ticks at measured values."""
    panel.set_xlabel("requests at once" if across == "max_concurrency" else "requests per second")
    if min(x_values) > 0 and max(x_values) / min(x_values) >= _WIDE:
        panel.set_xscale("log", base=2)
    ticks = sorted(set(x_values))
    step = math.ceil(len(ticks) / 8)
    panel.set_xticks(ticks[::step], [f"{tick:g}" for tick in ticks[::step]])
    panel.minorticks_off()
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.25, lw=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.title.set_fontsize(10)


def _axis(results: Sequence[Mapping[str, Any]]) -> str:
    for name in ("max_concurrency", "request_rate"):
        if all(_has_metric(result, name) for result in results):
            return name
    raise click.UsageError(
        "the results share neither --max-concurrency nor a finite --request-rate"
    )


def _has_metric(result: Mapping[str, Any], name: str) -> bool:
    return isinstance(result.get(name), int | float)
