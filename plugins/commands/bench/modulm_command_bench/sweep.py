"""`modulm bench sweep`: one benchmark at several loads, as a table, a file and a plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from modulm_command_bench.figures import save

__all__ = ["explored", "loads", "sweep"]

_COLUMNS = {
    "request_throughput": "requests/s",
    "output_throughput": "tokens/s",
    "median_ttft_ms": "ttft ms",
    "p99_ttft_ms": "p99",
    "median_tpot_ms": "tpot ms",
    "p99_tpot_ms": "p99",
    "failed": "failed",
}


def loads(concurrencies: str | None, rates: str | None) -> list[dict[str, Any]]:
    """The flags of each run. Raises click.UsageError unless exactly one list is given."""
    if (concurrencies is None) == (rates is None):
        raise click.UsageError("set --concurrencies 1,2,4 or --request-rates 1,2.5,5")
    if concurrencies is not None:
        return [
            {"max_concurrency": value} for value in _numbers("--concurrencies", concurrencies, int)
        ]
    return [{"request_rate": value} for value in _numbers("--request-rates", str(rates), float)]


def explored(
    variable: str, count: int, prompts: int
) -> Generator[dict[str, Any], dict[str, Any], None]:
    """Yield the flags of runs and receive their results: one request at a time, all at once, then
    `count` - 2 loads between what these two reached, evenly spaced.

    variable: "request_rate" or "max_concurrency". As `vllm bench sweep serve_workload` does.
    """
    alone = yield {"max_concurrency": 1}
    together = yield {"max_concurrency": prompts}
    low, high = math.ceil(_reached(alone, variable)), math.floor(_reached(together, variable))
    steps = (low + (high - low) * step / (count - 1) for step in range(1, count - 1))
    for value in sorted({max(1, round(step)) for step in steps}):
        yield {variable: value if variable == "max_concurrency" else float(value)}


def _reached(result: Mapping[str, Any], variable: str) -> float:
    """Return the load of a run: its requests per second, or how many ran at a time (Little)."""
    rate = float(result["request_throughput"])
    return rate if variable == "request_rate" else rate * float(result["mean_e2el_ms"]) / 1000


def _numbers(flag: str, text: str, kind: Callable[[str], float]) -> list[float]:
    try:
        values = [kind(word) for word in text.split(",") if word.strip()]
    except ValueError as error:
        raise click.UsageError(f"{flag} {text}: write numbers with commas between them") from error
    if not values or min(values) <= 0:
        raise click.UsageError(f"{flag} {text}: must be numbers above 0")
    return values


def sweep(
    runs: Iterable[Mapping[str, Any]],
    measure: Callable[[Mapping[str, Any]], dict[str, Any]],
    folder: Path,
    *,
    resume: bool = False,
) -> None:
    """Measure each run; writes results.jsonl to `folder`, and results.png if matplotlib is
    installed. resume: keep the results in the folder, and measure only the runs that have none.
    """
    from modulm_command_bench.plots import plot, read_results

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.jsonl"
    earlier = read_results([str(file)]) if resume and file.exists() else []
    if not resume:
        file.unlink(missing_ok=True)
    results: list[Mapping[str, Any]] = []
    for name, value in _answered(runs, results):
        done = [result for result in earlier if result.get(name) == value]
        if done:
            click.echo(f"{name.replace('_', ' ')}: {value:g} was measured before", err=True)
            results.append(done[-1])
            continue
        click.secho(f"{name.replace('_', ' ')}: {value:g}", bold=True, err=True)
        results.append(measure({name: value}))
        save(str(file), dict(results[-1]), append=True)
    click.echo(rows(results))
    picture = folder / "results.png"
    try:
        plot(results, str(picture))
        click.echo(f"written: {picture}", err=True)
    except click.ClickException as error:
        click.echo(f"note: no plot: {error.message}", err=True)


def _answered(
    runs: Iterable[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]
) -> Iterable[tuple[str, Any]]:
    """Yield flag and value of each run; a generator of runs is sent the last result."""
    if not isinstance(runs, Generator):
        yield from (next(iter(run.items())) for run in runs)
        return
    try:
        run = next(runs)
        while True:
            yield next(iter(run.items()))
            run = runs.send(results[-1])
    except StopIteration:
        return


def rows(results: Sequence[Mapping[str, Any]]) -> str:
    """Format one line per run."""
    columns = {name: title for name, title in _COLUMNS.items() if name in results[0]}
    lines = ["".join(f"{title:>12}" for title in ("load", *columns.values()))]
    for result in results:
        load = result["max_concurrency"] or result["request_rate"]
        cells = [f"{load:g}", *(f"{result[name]:,.2f}" for name in columns)]
        lines.append("".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)
