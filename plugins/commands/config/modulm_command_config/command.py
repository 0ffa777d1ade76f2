"""`modulm config show | diff | explain | docs`: shows flags and where their values come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from modulm_cli import FlagCommand, print_notices

if TYPE_CHECKING:
    from modulm.config.sources import Draft

__all__ = ["command"]


@click.group("config")
def command() -> None:
    """Show the configuration of a command line, a YAML file and the environment."""


@command.command("show", cls=FlagCommand, server=True)
@click.argument("model_tag", required=False, metavar="[MODEL]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of YAML.")
@click.option("--all", "everything", is_flag=True, help="Print defaults as well.")
def show(draft: Draft, model_tag: str | None, as_json: bool, everything: bool) -> None:
    """Print the flags that differ from their defaults; the output is a valid --config file."""
    from modulm_command_config.settings import written

    print_notices(draft.notices)
    click.echo(written(draft.config, as_json=as_json, everything=everything))


@command.command("diff")
@click.argument("first", type=click.Path(exists=True, dir_okay=False))
@click.argument("second", type=click.Path(exists=True, dir_okay=False), required=False)
def diff(first: str, second: str | None) -> None:
    """Compare two YAML files, or one with the defaults. Exits with 1 if they differ."""
    from modulm_command_config.settings import differences

    lines = differences(first, second)
    for line in lines:
        click.echo(line)
    if lines:
        raise SystemExit(1)


@command.command("explain", cls=FlagCommand, server=True)
@click.argument("model_tag", required=False, metavar="[MODEL]")
@click.option(
    "--use",
    type=click.Choice(["server", "offline"]),
    default="server",
    help="Whose defaults to explain: those of a server, or of offline engines.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(draft: Draft, model_tag: str | None, use: Any, as_json: bool) -> None:
    """Explain where each set or chosen value comes from."""
    from modulm_command_config.settings import explained

    click.echo(explained(draft, use, as_json=as_json))
    print_notices(draft.notices)


@command.command("docs")
def docs() -> None:
    """Print docs/config.md."""
    from modulm_command_config.page import markdown

    click.echo(markdown(), nl=False)
