"""`modulm generate`: answers for many prompts at once, from arguments, a file or standard input."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
from attrs import frozen

from modulm_cli import FlagCommand, print_notices

if TYPE_CHECKING:
    from modulm.config.sources import Draft

__all__ = ["check_first", "command", "read_jobs"]

#: The embedded model, or an id on the hub.
_HUB_ID = re.compile(r"demo|[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?")
_SAMPLING = ("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "ignore_eos")


@click.command("generate", cls=FlagCommand)
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@click.option(
    "-i",
    "--input",
    "source",
    type=click.File("r", encoding="utf-8"),
    help="Prompts: one per line, or JSONL with `prompt` or `messages`; - is stdin.",
)
@click.option(
    "-o",
    "--output",
    type=click.File("w", encoding="utf-8"),
    default="-",
    help="Output file; - is stdout.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "jsonl"]),
    help="Output format. Default: jsonl if the input is JSONL, else text.",
)
@click.option(
    "--chat/--no-chat",
    default=None,
    help="Apply the chat template to text prompts. Default: if the model has one.",
)
@click.option("--system-prompt", help="System prompt, with the chat template.")
@click.option("--n", type=int, default=1, help="Answers per prompt.")
@click.option(
    "--max-tokens", type=int, default=128, show_default=True, help="Maximum tokens per answer."
)
@click.option("--temperature", type=float, help="Sampling temperature.")
@click.option("--top-p", type=float, help="Probability mass to sample from.")
@click.option("--top-k", type=int, help="Number of tokens to sample from.")
@click.option("--min-p", type=float, help="Minimum probability, relative to the best token's.")
@click.option("--stop", multiple=True, help="Text that ends an answer; repeatable.")
@click.option(
    "--ignore-eos",
    is_flag=True,
    default=None,
    help="Ignore end-of-sequence tokens: generate --max-tokens tokens.",
)
@click.option("--no-progress", is_flag=True, help="Show no progress bar.")
def command(
    draft: Draft,
    prompts: tuple[str, ...],
    source: IO[str] | None,
    output: IO[str],
    form: str | None,
    chat: bool | None,
    system_prompt: str | None,
    no_progress: bool,
    **sampling: Any,
) -> None:
    """Answer prompts in batches, with a model in this process.

    The model is --model, by default the embedded one. A JSONL line may hold `prompt` (text or
    token ids) or `messages`; its other keys are copied to the answer's line.
    """
    if prompts and "model" not in draft.origins:
        check_first(prompts)
    jobs = read_jobs(prompts, source)
    if not jobs:
        raise click.UsageError("no prompt: give one as an argument, with -i FILE, or on stdin")
    lines = form == "jsonl" or (form is None and any(job.keys() - {"prompt"} for job in jobs))
    print_notices(draft.notices)
    answers = _answers(
        draft, jobs, sampling, PromptOptions(chat, system_prompt), progress=not no_progress
    )
    for job, answer in zip(jobs, answers, strict=True):
        output.write(_line(job, answer) if lines else _text(answer))


def read_jobs(prompts: Sequence[str], source: IO[str] | None) -> list[dict[str, Any]]:
    """Read one table per prompt. Raises click.UsageError for an invalid line."""
    jobs: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
    if source is None and not prompts and not sys.stdin.isatty():
        source = sys.stdin
    if source is not None:
        jobs += _jobs(source)
    return jobs


def check_first(prompts: Sequence[str]) -> None:
    """Raise click.UsageError if the first prompt looks like a model."""
    first, *others = prompts
    is_folder = Path(first, "config.json").is_file() or first.endswith((".gguf", ".safetensors"))
    if is_folder or (others and _HUB_ID.fullmatch(first)):
        rest = shlex.join(others) or "PROMPT"
        raise click.UsageError(
            f"{first} looks like a model: modulm generate --model {shlex.quote(first)} {rest}"
        )


def _jobs(lines: Iterable[str]) -> list[dict[str, Any]]:
    return [_job(line, number) for number, line in enumerate(lines, 1) if line.strip()]


def _job(line: str, number: int) -> dict[str, Any]:
    if not line.lstrip().startswith("{"):
        return {"prompt": line.rstrip("\n")}
    try:
        job = json.loads(line)
    except json.JSONDecodeError as error:
        raise click.UsageError(f"line {number} of the input is not valid JSON: {error}") from error
    if ("prompt" in job) == ("messages" in job):
        raise click.UsageError(f"line {number} of the input needs `prompt` or `messages`")
    return dict(job)


@frozen
class PromptOptions:
    """Options for text prompts.

    chat: send as a conversation; None means if the model has a template. system: the system prompt.
    """

    chat: bool | None
    system: str | None

    def check(self, jobs: Sequence[Mapping[str, Any]]) -> None:
        """Raise click.UsageError for options that exclude each other."""
        if self.chat and any(isinstance(job.get("prompt"), list) for job in jobs):
            raise click.UsageError("--chat requires text prompts, not token ids")
        if self.system and self.chat is False:
            raise click.UsageError("--system-prompt needs a conversation: leave --no-chat out")

    def messages(self, job: Mapping[str, Any], templated: bool) -> list[Any] | None:
        """Return the conversation of a job; None if its prompt is completed as it is."""
        if "messages" in job:
            return list(job["messages"])
        as_chat = templated if self.chat is None else self.chat
        if not as_chat or not isinstance(job["prompt"], str):
            return None
        before = [{"role": "system", "content": self.system}] if self.system else []
        return [*before, {"role": "user", "content": job["prompt"]}]


def _answers(
    draft: Draft,
    jobs: Sequence[Mapping[str, Any]],
    sampling: Mapping[str, Any],
    prompt_options: PromptOptions,
    *,
    progress: bool,
) -> list[Any]:
    """Return the engine's outputs in the order of the jobs."""
    from modulm.contracts.sampling import SamplingParams
    from modulm_frontend.llm import LLM

    values = {name: sampling[name] for name in _SAMPLING if sampling[name] not in (None, ())}
    params = SamplingParams(**values)
    prompt_options.check(jobs)
    with LLM.from_config(draft.config) as engine:
        tokenizer = engine.tokenizer
        templated = tokenizer is not None and bool(tokenizer.chat or tokenizer.chat_template)
        if prompt_options.system and not templated:
            raise click.UsageError("--system-prompt needs a chat template, and the model has none")
        conversations = [prompt_options.messages(job, templated) for job in jobs]
        chats = [messages for messages in conversations if messages is not None]
        left = zip(jobs, conversations, strict=True)
        texts = [_prompt(job["prompt"]) for job, messages in left if messages is None]
        chatted: list[Any] = engine.chat(chats, params, use_tqdm=progress) if chats else []
        written: list[Any] = engine.generate(texts, params, use_tqdm=progress) if texts else []
    of_chats, of_texts = iter(chatted), iter(written)
    return [next(of_texts if messages is None else of_chats) for messages in conversations]


def _prompt(prompt: Any) -> Any:
    return {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt


def _text(answer: Any) -> str:
    return "".join(f"{output.text}\n" for output in answer.outputs)


def _line(job: Mapping[str, Any], answer: Any) -> str:
    outputs = [
        {
            "text": one.text,
            **({"reasoning": one.reasoning} if one.reasoning is not None else {}),
            "finish_reason": one.finish_reason,
            "tokens": len(one.token_ids),
        }
        for one in answer.outputs
    ]
    prompt = len(answer.prompt_token_ids or ())
    row = {**job, "outputs": outputs, "prompt_tokens": prompt}
    return json.dumps(row, ensure_ascii=False) + "\n"
