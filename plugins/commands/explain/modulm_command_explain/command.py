"""`modulm explain MODEL`: the choices for running a model, with reasons."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

import click

from modulm.config.sources import Draft
from modulm_cli import FlagCommand, print_notices

if TYPE_CHECKING:
    from modulm.contracts.decision import Decision

__all__ = ["command", "decisions_for"]


@click.command("explain", cls=FlagCommand, server=True)
@click.argument("model_tag", required=False, metavar="[MODEL]")
@click.option("--all", "everything", is_flag=True, help="Show rejected candidates, with reasons.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with rejected candidates.")
def command(draft: Draft, model_tag: str | None, everything: bool, as_json: bool) -> None:
    """Show which drivers would run MODEL on this machine, and why.

    Takes the flags of `modulm serve`. Reads the checkpoint's description, not its weights.
    """
    from modulm_command_explain.text import as_data, render

    print_notices(draft.notices)
    with redirect_stdout(sys.stderr):  # redirects what plugins print
        decisions = decisions_for(draft)
    if as_json:
        click.echo(json.dumps(as_data(decisions), indent=2))
    else:
        click.echo(render(decisions, everything))


def decisions_for(draft: Draft) -> list[Decision]:
    """The decisions that serving with this draft would make, in order.

    Raises the errors that serving would raise before it reads weights.
    """
    from modulm.contracts.decision import Decision
    from modulm.engine.parts import open_parts
    from modulm.errors import ModulmError
    from modulm.loading import explain_model, resolve_checkpoint
    from modulm.plugins import manager
    from modulm_chat.choice import chat_decisions
    from modulm_distributed.choice import collectives_decisions
    from modulm_memory.advice import memory_decision
    from modulm_memory.estimate import estimate_opened
    from modulm_parsing.choice import parser_decisions
    from modulm_server.flags import ServerConfig

    plugins = manager.current()
    opened = resolve_checkpoint(draft.config, plugins, "server", draft.explicit)
    config, device = opened.resolved.config, opened.device
    parts = open_parts(config, plugins)
    masks = any(part.masks for part in parts)
    try:
        found = estimate_opened(opened, plugins)
        model, memory = found.decisions, memory_decision(found)
    except ModulmError as error:
        model = explain_model(config, opened.checkpoint, opened.platform, plugins, masks=masks)
        memory = Decision("memory", (), None, f"not estimated: {error}")
    chat_template = draft.config.group(ServerConfig).chat_template
    chat = chat_decisions(draft.config, opened.checkpoint.path, plugins, chat_template)
    flags = [
        decision for decision in opened.resolved.decisions if decision.subject != device.subject
    ]
    shown = [decision for part in parts if (decision := part.decision()) is not None]
    parsers = parser_decisions(draft.config, plugins)
    ranks = collectives_decisions(config, opened.platform, plugins)
    return [device, *model, *ranks, *shown, *chat, *parsers, *flags, memory]
