"""`modulm serve [MODEL]`: the OpenAI-compatible server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from modulm.cli.options import FlagCommand, print_notices

if TYPE_CHECKING:
    from modulm.config.sources import Draft

__all__ = ["command"]


@click.command("serve", cls=FlagCommand, server=True)
@click.argument("model_tag", required=False, metavar="[MODEL]")
def command(draft: Draft, model_tag: str | None) -> None:
    """Serve a model over HTTP, with the APIs of OpenAI and Anthropic.

    MODEL is a folder, a Hugging Face id or a short name; without one the embedded model answers.
    """
    print_notices(draft.notices)
    if "model" not in draft.origins:
        click.echo(
            "No model named: serving the small embedded one. "
            "`modulm serve MODEL` serves a folder or a Hugging Face id.",
            err=True,
        )
    from modulm.server.serve import run

    run(draft.config)
