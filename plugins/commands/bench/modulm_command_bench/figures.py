"""Computes benchmark results from the times of single requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from attrs import field, frozen

__all__ = ["METRICS", "Timed", "compare", "figures", "parse_goodput", "save", "table"]

#: Short name of a metric -> its name in tables.
METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "time between tokens",
    "e2el": "time of a request",
}


@frozen
class Timed:
    """The times of one request in seconds. gaps: between pieces of text."""

    input_len: int
    output_len: int = 0
    ttft: float = 0.0
    latency: float = 0.0
    gaps: tuple[float, ...] = field(default=(), repr=False)
    text: str = field(default="", repr=False)
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        if self.output_len < 2:
            return None
        return (self.latency - self.ttft) / (self.output_len - 1)

    def times(self, metric: str) -> tuple[float, ...]:
        """The request's contribution to a metric, in seconds."""
        if metric == "itl":
            return self.gaps
        if metric == "tpot":
            return () if self.tpot is None else (self.tpot,)
        return (self.ttft,) if metric == "ttft" else (self.latency,)


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Parse `ttft:200 tpot:50`, in milliseconds, to seconds by metric. Raises click.UsageError."""
    limits: dict[str, float] = {}
    for pair in (part for argument in pairs for part in argument.split()):
        name, colon, number = pair.partition(":")
        if not colon or name not in METRICS or name == "itl":
            raise click.UsageError(f"--goodput {pair}: write ttft:MS, tpot:MS or e2el:MS")
        try:
            limits[name] = float(number) / 1000
        except ValueError as error:
            raise click.UsageError(f"--goodput {pair}: {number} is not a number") from error
    return limits


def figures(
    requests: Sequence[Timed],
    seconds: float,
    *,
    metrics: Sequence[str] = tuple(METRICS),
    percentiles: Sequence[float] = (99,),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Compute throughputs and the distribution of each metric, with vLLM's names."""
    done = [request for request in requests if request.error is None]
    read = sum(request.input_len for request in done)
    generated = sum(request.output_len for request in done)
    results: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(requests) - len(done),
        "total_input_tokens": read,
        "total_output_tokens": generated,
        "request_throughput": len(done) / seconds,
        "output_throughput": generated / seconds,
        "total_token_throughput": (read + generated) / seconds,
    }
    if goodput:
        results["request_goodput"] = sum(_good(request, goodput) for request in done) / seconds
    for metric in metrics:
        results |= _spread(
            metric, [t for request in done for t in request.times(metric)], percentiles
        )
    return results


def _good(request: Timed, limits: Mapping[str, float]) -> bool:
    return all(time <= limit for name, limit in limits.items() for time in request.times(name))


def _spread(metric: str, times: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles in milliseconds."""
    values = np.array(times or [0.0]) * 1000
    statistics = {
        f"mean_{metric}_ms": float(values.mean()),
        f"median_{metric}_ms": float(np.median(values)),
        f"std_{metric}_ms": float(values.std()),
    }
    for percentile in percentiles:
        statistics[f"p{percentile:g}_{metric}_ms"] = float(np.percentile(values, percentile))
    return statistics


def table(results: Mapping[str, Any]) -> str:
    """Format results as text, one per line."""
    rows = [(name.replace("_", " "), value) for name, value in results.items()]
    rows = [(name, value) for name, value in rows if isinstance(value, int | float)]
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:{width}}  {_number(value):>12}" for name, value in rows)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def compare(results: Sequence[Mapping[str, Any]]) -> str:
    """Format several results in columns, with ratios to the first."""
    first, *others = results
    names = [n for n in first if all(_is_figure(result.get(n)) for result in results)]
    width = max((len(name) for name in names), default=0)
    labels = [str(result.get("label") or number) for number, result in enumerate(results, 1)]
    head = "".join(f"  {label[:12]:>12}  {'ratio':>7}" for label in labels[1:])
    lines = [f"{'':{width}}  {labels[0][:12]:>12}{head}"]
    for name in names:
        one = first[name]
        cells = [f"  {_number(other[name]):>12}  {_ratio(other[name], one)}" for other in others]
        lines.append(f"{name:{width}}  {_number(one):>12}{''.join(cells)}")
    return "\n".join(lines)


def _ratio(value: float, base: float) -> str:
    return f"{value / base:7.2f}" if base else f"{'-':>7}"


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def save(path: str, result: Mapping[str, Any], *, append: bool = False) -> None:
    """Write a result as JSON. append: add it as a line."""
    text = json.dumps(result, indent=None if append else 2, default=str)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("a" if append else "w", encoding="utf-8") as file:
        file.write(text + "\n")
    click.echo(f"written: {path}", err=True)
