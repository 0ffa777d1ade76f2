"""`modulm complete`: completes prompts with a server or a model in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from modulm_cli import FlagCommand
from modulm_command_chat.chat import open_backend, show

if TYPE_CHECKING:
    from modulm.config.sources import Draft
    from modulm_command_chat.backends import Backend, SamplingOptions

__all__ = ["command"]


@click.command("complete", cls=FlagCommand)
@click.argument("model_tag", required=False, metavar="[MODEL]")
@click.option(
    "--url", help="Address of a server, with /v1. Default: run the model in this process."
)
@click.option("--model-name", help="Model on the server. Default: the first that it lists.")
@click.option(
    "--api-key", help="API key for the server. Default: MODULM_API_KEY or OPENAI_API_KEY."
)
@click.option("-q", "--quick", metavar="PROMPT", help="Complete one prompt and exit.")
@click.option("--stats", is_flag=True, help="Print tokens per second after each text.")
@click.option(
    "--max-tokens", type=int, default=128, show_default=True, help="Maximum tokens to generate."
)
@click.option("--temperature", type=float, help="Sampling temperature.")
@click.option("--top-p", type=float, help="Probability mass to sample from.")
def command(
    draft: Draft,
    model_tag: str | None,
    url: str | None,
    model_name: str | None,
    api_key: str | None,
    quick: str | None,
    stats: bool,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
) -> None:
    """Complete prompts, one per line, until Ctrl-D.

    With --url, a server answers. Otherwise MODEL (by default the embedded one) runs in this
    process.
    """
    from modulm_command_chat.backends import SamplingOptions

    backend = open_backend(draft, url, api_key, model_name)
    options = SamplingOptions(max_tokens, temperature, top_p)
    try:
        if quick is not None:
            _complete(backend, quick, options, stats)
            return
        while True:
            _complete(backend, input("> "), options, stats)
    except (EOFError, KeyboardInterrupt):
        click.echo()
    finally:
        backend.close()


def _complete(backend: Backend, prompt: str, options: SamplingOptions, stats: bool) -> None:
    if not prompt.strip():
        return
    _, whole = show(backend.complete(prompt, options))
    if stats and whole and backend.stats:
        click.secho(str(backend.stats), dim=True, err=True)
