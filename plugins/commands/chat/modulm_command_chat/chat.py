"""`modulm chat`: a conversation in the terminal, with a server or with a model in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modulm_cli import FlagCommand, print_notices

if TYPE_CHECKING:
    from modulm.config.sources import Draft
    from modulm_command_chat.backends import Backend, Piece, SamplingOptions

__all__ = ["Conversation", "command", "open_backend", "show"]

_HELP = "/clear starts anew, /system TEXT sets the system prompt, /quit or Ctrl-D ends"


@click.command("chat", cls=FlagCommand)
@click.argument("model_tag", required=False, metavar="[MODEL]")
@click.option(
    "--url", help="Address of a server, with /v1. Default: run the model in this process."
)
@click.option("--model-name", help="Model on the server. Default: the first that it lists.")
@click.option(
    "--api-key", help="API key for the server. Default: MODULM_API_KEY or OPENAI_API_KEY."
)
@click.option("--system-prompt", help="System prompt of the conversation.")
@click.option(
    "-q", "--quick", metavar="MESSAGE", help="Send one message, print the answer and exit."
)
@click.option("--stats", is_flag=True, help="Print tokens per second after each answer.")
@click.option("--max-tokens", type=int, help="Maximum tokens of an answer.")
@click.option("--temperature", type=float, help="Sampling temperature.")
@click.option("--top-p", type=float, help="Probability mass to sample from.")
def command(
    draft: Draft,
    model_tag: str | None,
    url: str | None,
    model_name: str | None,
    api_key: str | None,
    system_prompt: str | None,
    quick: str | None,
    stats: bool,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
) -> None:
    """Chat with a model in the terminal.

    With --url, a server answers. Otherwise MODEL (by default the embedded one) runs in this
    process. Ctrl-C stops an answer, Ctrl-D ends the conversation.
    """
    from modulm_command_chat.backends import SamplingOptions

    backend = open_backend(draft, url, api_key, model_name)
    conversation = Conversation(
        backend, SamplingOptions(max_tokens, temperature, top_p), system_prompt, stats
    )
    try:
        if quick is not None:
            conversation.say(quick)
        else:
            conversation.run()
    finally:
        backend.close()


def open_backend(draft: Draft, url: str | None, key: str | None, model: str | None) -> Backend:
    """Open the server at `url`, or the configured model in this process."""
    from modulm_cli.client_key import client_key
    from modulm_command_chat.backends import LocalEngine, RemoteServer

    if url is not None:
        return RemoteServer(url, key or client_key(), model)
    if model is not None:
        raise click.UsageError("--model-name requires --url; without it use the argument MODEL")
    print_notices(draft.notices)
    if "model" not in draft.origins:
        click.echo("No model given: using the small embedded one.", err=True)
    return LocalEngine(draft)


class Conversation:
    """The messages so far, and a loop that reads and answers."""

    def __init__(
        self, backend: Backend, options: SamplingOptions, system: str | None, stats: bool
    ) -> None:
        self._backend = backend
        self._options = options
        self._stats = stats
        self.messages: list[dict[str, Any]] = []
        self.restart(system)

    def restart(self, system: str | None) -> None:
        """Clear the messages, except the system prompt."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def say(self, text: str) -> bool:
        """Send a message and show the answer; false if the user stopped it."""
        self.messages.append({"role": "user", "content": text})
        answer, whole = show(self._backend.chat(self.messages, self._options))
        self.messages.append({"role": "assistant", "content": answer})
        if self._stats and whole and self._backend.stats:
            click.secho(str(self._backend.stats), dim=True, err=True)
        return whole

    def run(self) -> None:
        """Read and answer until Ctrl-D or /quit."""
        click.echo(f"{self._backend.model}: {_HELP}", err=True)
        with _history():
            while (line := _ask()) is not None:
                if not self._order(line):
                    return

    def _order(self, line: str) -> bool:
        """Execute one line of input; false ends the conversation."""
        if line in ("/quit", "/exit"):
            return False
        if line == "/clear":
            self.restart(self._system())
        elif line.startswith("/system"):
            self.restart(line.removeprefix("/system").strip())
        elif line.startswith("/"):
            click.echo(_HELP, err=True)
        elif line:
            self._say_or_report(line)
        return True

    def _say_or_report(self, line: str) -> None:
        try:
            self.say(line)
        except click.ClickException as error:
            self.messages.pop()
            error.show()

    def _system(self) -> str | None:
        first = self.messages[0] if self.messages else {}
        return first.get("content") if first.get("role") == "system" else None


def show(pieces: Iterator[Piece]) -> tuple[str, bool]:
    """Print an answer while it streams; returns (its text, whether it is complete)."""
    text: list[str] = []
    before = "text"
    whole = True
    try:
        for piece in pieces:
            if piece.kind != before and (text or before != "text"):
                click.echo()
            before = piece.kind
            click.secho(piece.text, nl=False, dim=piece.kind == "reasoning" or None)
            if piece.kind == "text":
                text.append(piece.text)
    except KeyboardInterrupt:
        whole = False
        click.secho(" [stopped]", dim=True, nl=False)
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
    click.echo()
    return "".join(text), whole


def _ask() -> str | None:
    """Read a line from the user; None at Ctrl-D, empty at Ctrl-C."""
    try:
        return input("> ").strip()
    except EOFError:
        click.echo()
        return None
    except KeyboardInterrupt:
        click.echo()
        return ""


class _history:  # noqa: N801
    """Line editing with history, if the terminal supports it."""

    def __init__(self) -> None:
        self._file = Path(click.get_app_dir("modulm")) / "chat_history"
        self._readline: Any = None

    def __enter__(self) -> None:
        with suppress(ImportError):
            import readline

            self._readline = readline
            with suppress(OSError):
                readline.read_history_file(self._file)

    def __exit__(self, *_: object) -> None:
        if self._readline is None:
            return
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._readline.set_history_length(1000)
            self._readline.write_history_file(self._file)
