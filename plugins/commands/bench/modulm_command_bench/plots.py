"""Results of several runs as a picture: throughput and waiting over concurrency or rate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

__all__ = ["plot", "read_results"]


def read_results(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Results from files, each with one JSON object or one per line."""
    results: list[dict[str, Any]] = []
    for path in paths:
        text = Path(path).read_text(encoding="utf-8")
        try:
            results.append(json.loads(text))
        except json.JSONDecodeError:
            try:
                results += [json.loads(line) for line in text.splitlines() if line.strip()]
            except json.JSONDecodeError as error:
                raise click.UsageError(f"{path} holds no results: {error}") from error
    return results


def plot(results: Sequence[Mapping[str, Any]], path: str) -> None:
    """Write a PNG: output tokens per second and median time to first token, by label.

    Raises click.ClickException where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise click.ClickException(
            "plots need matplotlib: pip install 'modulm-command-bench[plot]'"
        ) from error
    across = _axis(results)
    picture = Figure(figsize=(10, 4), layout="constrained")
    throughput, waiting = picture.subplots(1, 2)
    for label in dict.fromkeys(str(result.get("label", "")) for result in results):
        own = [result for result in results if str(result.get("label", "")) == label]
        points = sorted((float(result[across]), result) for result in own if _known(result, across))
        places = [place for place, _ in points]
        throughput.plot(places, [r["output_throughput"] for _, r in points], "o-", label=label)
        times = [r.get("median_ttft_ms", 0.0) for _, r in points]
        waiting.plot(places, times, "o-", label=label)
    for axes, title in ((throughput, "output tokens/s"), (waiting, "median ms to first token")):
        axes.set_xlabel(across.replace("_", " "))
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    picture.savefig(path, dpi=120)


def _axis(results: Sequence[Mapping[str, Any]]) -> str:
    for name in ("max_concurrency", "request_rate"):
        if all(_known(result, name) for result in results):
            return name
    raise click.UsageError(
        "the results share neither --max-concurrency nor a finite --request-rate"
    )


def _known(result: Mapping[str, Any], name: str) -> bool:
    return isinstance(result.get(name), int | float)
