"""`modulm completion SHELL`: prints a script for shell completion."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

__all__ = ["command"]


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print a completion script: eval "$(modulm completion bash)"."""
    completion_class = get_completion_class(shell)
    if completion_class is None:
        raise click.UsageError(f"no completion for {shell}", ctx)
    root = ctx.find_root()
    click.echo(completion_class(root.command, {}, "modulm", "_MODULM_COMPLETE").source())
