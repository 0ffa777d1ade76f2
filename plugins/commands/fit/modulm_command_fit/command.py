"""`modulm fit MODEL`: what a model needs in memory, before it is loaded."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from modulm_cli import FlagCommand, print_notices

if TYPE_CHECKING:
    from modulm.config.sources import Draft

__all__ = ["command"]


@click.command("fit", cls=FlagCommand, server=True)
@click.argument("model_tag", required=False, metavar="[MODEL]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with sizes in bytes.")
@click.option(
    "--device-memory",
    metavar="SIZE",
    help="Free memory of each device, such as 24GiB, instead of that of this machine.",
)
def command(draft: Draft, model_tag: str | None, as_json: bool, device_memory: str | None) -> None:
    """Show the memory that MODEL needs, and the longest context that fits.

    Suggests flags that fit if the defaults do not. Takes the flags of `modulm serve`. Reads
    config.json and headers of weight files only; for a hub id, these are all that is downloaded.
    Exits with 1 if the model does not fit.
    """
    print_notices(draft.notices)
    with _without_collection():
        from modulm_memory.report import report
        from modulm_memory.sizes import parse_memory

        memory = parse_memory(device_memory)
        text, fits = report(draft.config, draft.explicit, memory, as_json=as_json)
    click.echo(text)
    if Path(sys.argv[0]).stem == "modulm":
        atexit.register(_end, 0 if fits else 1)
    if not fits:
        raise SystemExit(1)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Suspend garbage collection, which finds little while modules are imported."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _end(code: int) -> None:
    """End the process without freeing what was imported, which takes a fifth of its time."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
