"""`modulm fit MODEL`: what a model needs in memory, before it is loaded."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
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
    """Show what MODEL needs in memory, the longest context that fits, and what to change.

    Takes the flags of `modulm serve`. Reads config.json and headers of weight files only; for a hub
    id, these are all that is downloaded. Exits with 1 if the model does not fit.
    """
    from modulm.plugins import manager
    from modulm_memory.advice import changes_for
    from modulm_memory.estimate import estimate
    from modulm_memory.hub_headers import headers_only
    from modulm_memory.text import as_data, parse_memory, render

    print_notices(draft.notices)
    memory = parse_memory(device_memory)
    plugins = manager.current()
    with redirect_stdout(sys.stderr), headers_only(draft.config) as config:
        found = estimate(config, plugins, draft.explicit, memory)
        name = draft.config.model.model
        changes = changes_for(found, plugins, draft.explicit, config, memory, name=name)
    if as_json:
        click.echo(json.dumps(as_data(found, changes, name), indent=2))
    else:
        click.echo(render(found, changes, name))
    if found.problem or ("max_model_len" in draft.explicit and not found.fits):
        raise SystemExit(1)
