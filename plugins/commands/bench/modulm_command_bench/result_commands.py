"""The commands `compare` and `plot`, which import their code on demand."""

from __future__ import annotations

import click

__all__ = ["compare", "plot"]


@click.command("compare")
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False))
def compare(files: tuple[str, ...]) -> None:
    """Compare saved results, relative to the first."""
    from modulm_command_bench.figures import compare as side_by_side
    from modulm_command_bench.plots import read_results

    results = read_results(files)
    if len(results) < 2:
        raise click.UsageError("at least two results are required")
    click.echo(side_by_side(results))


@click.command("plot")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("-o", "--output", default="bench.png", show_default=True, help="PNG to write.")
@click.option(
    "--pareto",
    is_flag=True,
    help="Plot tokens per second of a device over those of a user, and the best of both.",
)
@click.option(
    "--devices",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Devices of the server, for --pareto; a result's metadata `devices` takes precedence.",
)
def plot(files: tuple[str, ...], output: str, pareto: bool, devices: int) -> None:
    """Plot saved results over concurrency or request rate."""
    from modulm_command_bench.plots import plot as draw
    from modulm_command_bench.plots import plot_pareto, read_results

    if pareto:
        plot_pareto(read_results(files), output, devices)
    else:
        draw(read_results(files), output)
    click.echo(f"written: {output}", err=True)
