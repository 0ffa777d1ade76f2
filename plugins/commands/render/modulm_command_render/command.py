"""`modulm render`: shows the prompt of a conversation, as text and tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modulm_cli import FlagCommand, print_notices

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from modulm.config.sources import Draft
    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["command", "rendered"]

#: Fields of a request besides the messages, by their API names.
_FIELDS = (
    "messages", "tools", "documents", "chat_template_kwargs", "reasoning_effort",
    "add_generation_prompt", "continue_final_message", "prompt",
)  # fmt: skip


@click.command("render", cls=FlagCommand, server=True)
@click.argument("model_tag", required=False, metavar="[MODEL]")
@click.option("-m", "--message", "texts", multiple=True, metavar="TEXT", help="User message.")
@click.option("--system-prompt", metavar="TEXT", help="System message.")
@click.option(
    "-i",
    "--input",
    "source",
    type=click.File("r", encoding="utf-8"),
    help="JSON: a list of messages, or a request with `messages` or `prompt`; - is stdin.",
)
@click.option("-p", "--prompt", metavar="TEXT", help="Prompt to use without the chat template.")
@click.option("--tools", metavar="JSON|FILE", help="Tools, in OpenAI's format.")
@click.option("--documents", metavar="JSON|FILE", help="Documents for the chat template.")
@click.option(
    "--chat-template-kwargs", metavar="JSON", help="Additional variables of the chat template."
)
@click.option(
    "--no-generation-prompt",
    is_flag=True,
    help="Do not append the beginning of the assistant's message.",
)
@click.option(
    "--continue-final-message",
    is_flag=True,
    help="Continue the last message instead of beginning a new one.",
)
@click.option(
    "--tokens", "as_table", is_flag=True, help="Print one line per token: position, id, text."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: prompt, ids, tokens.")
def command(
    draft: Draft,
    model_tag: str | None,
    texts: tuple[str, ...],
    system_prompt: str | None,
    source: Any,
    prompt: str | None,
    as_table: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Render messages with the chat template of MODEL, as the server does.

    Takes the flags of `modulm serve` (--chat-template, --tokenizer-mode ...). Reads the tokenizer,
    not the weights. Messages are -m texts, -i JSON, or JSON on standard input.
    """
    body = _body(texts, system_prompt, source, prompt, options)
    print_notices(draft.notices)
    tokenizer = _tokenizer(draft)
    text, ids = rendered(draft, tokenizer, body)
    if as_json:
        pieces = list(_pieces(tokenizer, ids))
        click.echo(json.dumps({"prompt": text, "token_ids": ids, "tokens": pieces}))
    elif as_table:
        width, digits = len(str(len(ids))), len(str(max(ids, default=0)))
        for position, (index, piece) in enumerate(zip(ids, _pieces(tokenizer, ids), strict=True)):
            click.echo(
                f"{position:{width}}  {index:{digits}}  {json.dumps(piece, ensure_ascii=False)}"
            )
    else:
        click.echo(text)


def rendered(draft: Draft, tokenizer: Tokenizer, body: Mapping[str, Any]) -> tuple[str, list[int]]:
    """Render a request's prompt with the server's settings; returns (text, token ids).

    Raises RequestError for invalid messages, ConfigError for an invalid template.
    """
    from modulm_chat.conversation import encode_chat, load_template
    from modulm_server.flags import ServerConfig

    if "prompt" in body:
        ids = tokenizer.encode(str(body["prompt"]))
        return tokenizer.decode(ids, skip_special_tokens=False), ids
    server = draft.config.group(ServerConfig)
    variables = {
        **(server.default_chat_template_kwargs or {}),
        **(body.get("chat_template_kwargs") or {}),
    }
    if body.get("reasoning_effort") is not None:
        variables.setdefault("reasoning_effort", body["reasoning_effort"])
    going = bool(body.get("continue_final_message"))
    generation_prompt = body.get("add_generation_prompt")
    ids, text = encode_chat(
        body["messages"],
        tokenizer=tokenizer,
        tools=body.get("tools") or None,
        documents=body.get("documents"),
        template=None if server.chat_template is None else load_template(server.chat_template),
        add_generation_prompt=not going if generation_prompt is None else bool(generation_prompt),
        continue_final_message=going,
        content=server.chat_template_content_format,
        kwargs=variables,
    )
    return text, ids


def _body(
    texts: Sequence[str],
    system: str | None,
    source: Any,
    prompt: str | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Build the request from arguments and input."""
    if prompt is not None:
        if texts or source is not None or system is not None:
            raise click.UsageError("--prompt cannot be combined with messages")
        return {"prompt": prompt}
    if source is None and not texts and not sys.stdin.isatty():
        source = sys.stdin
    body = {} if source is None else _request(source.read())
    messages = [*body.get("messages", ()), *({"role": "user", "content": t} for t in texts)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    if "prompt" in body:
        if messages:
            raise click.UsageError("a prompt cannot be combined with messages")
        return body
    if not messages:
        raise click.UsageError("no messages: give -m TEXT, -i FILE, or JSON on standard input")
    body["messages"] = messages
    for name in ("tools", "documents", "chat_template_kwargs"):
        if options[name] is not None:
            body[name] = _json(f"--{name.replace('_', '-')}", options[name])
    if options["no_generation_prompt"]:
        body["add_generation_prompt"] = False
    if options["continue_final_message"]:
        body["continue_final_message"] = True
    return body


def _request(text: str) -> dict[str, Any]:
    parsed = _parsed("the input", text)
    body = parsed if isinstance(parsed, dict) else {"messages": parsed}
    messages = body.get("messages", [])
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise click.UsageError("the input: a list of messages, or an object with `messages`")
    return {name: value for name, value in body.items() if name in _FIELDS and value is not None}


def _json(option: str, value: str) -> Any:
    """Read JSON from a value, or from the file that it names."""
    if value.lstrip()[:1] in ("[", "{"):
        return _parsed(option, value)
    try:
        return _parsed(option, Path(value).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{option}: {value} cannot be read") from error


def _parsed(what: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"{what} is not valid JSON: {error}") from error


def _tokenizer(draft: Draft) -> Tokenizer:
    from modulm.loading.checkpoint import open_checkpoint
    from modulm.plugins import manager
    from modulm_tokenizers.tokenizer import open_tokenizer

    path = open_checkpoint(draft.config, manager.current()).path
    tokenizer = open_tokenizer(draft.config, str(path))
    if tokenizer is None:
        raise click.UsageError("--skip-tokenizer-init leaves no tokenizer to render with")
    return tokenizer


def _pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[str]:
    """Yield the text that each token adds; empty for incomplete characters."""
    from modulm_tokenizers.detokenizer import Detokenizer

    stream = Detokenizer(tokenizer, skip_special_tokens=False)
    for position, index in enumerate(ids, 1):
        piece = stream.feed([index])
        yield piece + stream.finish() if position == len(ids) else piece
