"""Tables of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click

__all__ = ["print_table"]


def print_table(rows: Iterable[dict[str, str]], columns: Sequence[str]) -> None:
    """Print rows as a table of these columns."""
    lines = [columns, *([row[column] for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        cells = (f"{cell:{width}}" for cell, width in zip(line, widths, strict=True))
        click.echo("  ".join(cells).rstrip())
