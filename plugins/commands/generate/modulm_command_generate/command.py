"""`modulm generate`: answers for many prompts at once, from arguments, a file or standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

import click

from modulm_cli import FlagCommand, print_notices

if TYPE_CHECKING:
    from modulm.config.sources import Draft

__all__ = ["command", "read_jobs"]

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
    help="Where answers go; - is stdout.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "jsonl"]),
    help="Default: jsonl if the input is JSONL, else text.",
)
@click.option("--chat", is_flag=True, help="Put each prompt into the chat template.")
@click.option("--system-prompt", help="System prompt, with --chat.")
@click.option("--n", type=int, default=1, help="Answers per prompt.")
@click.option(
    "--max-tokens", type=int, default=128, show_default=True, help="Most new tokens per answer."
)
@click.option("--temperature", type=float, help="Sampling temperature.")
@click.option("--top-p", type=float, help="Probability mass to sample from.")
@click.option("--top-k", type=int, help="Number of tokens to sample from.")
@click.option("--min-p", type=float, help="Least probability, relative to the best token's.")
@click.option("--stop", multiple=True, help="Text that ends an answer; may be given often.")
@click.option("--ignore-eos", is_flag=True, default=None, help="Go on to --max-tokens.")
@click.option("--no-progress", is_flag=True, help="Show no progress bar.")
def command(
    draft: Draft,
    prompts: tuple[str, ...],
    source: IO[str] | None,
    output: IO[str],
    form: str | None,
    chat: bool,
    system_prompt: str | None,
    no_progress: bool,
    **sampling: Any,
) -> None:
    """Answer prompts with a model in this process, many at a time.

    The model is --model, by default the embedded one. A JSONL line may hold `prompt` (text or
    token ids) or `messages`; its other keys are copied to the answer's line.
    """
    jobs = read_jobs(prompts, source)
    if not jobs:
        raise click.UsageError("no prompt: give one as an argument, with -i FILE, or on stdin")
    lines = form == "jsonl" or (form is None and any(job.keys() - {"prompt"} for job in jobs))
    if chat:
        jobs = [_as_chat(job, system_prompt) for job in jobs]
    print_notices(draft.notices)
    answers = _answers(draft, jobs, sampling, progress=not no_progress)
    for job, answer in zip(jobs, answers, strict=True):
        output.write(_line(job, answer) if lines else _text(answer))


def read_jobs(prompts: Sequence[str], source: IO[str] | None) -> list[dict[str, Any]]:
    """One table per prompt. Raises click.UsageError for a line that is neither text nor a job."""
    jobs: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
    if source is None and not prompts and not sys.stdin.isatty():
        source = sys.stdin
    if source is not None:
        jobs += _jobs(source)
    return jobs


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


def _as_chat(job: Mapping[str, Any], system: str | None) -> dict[str, Any]:
    if "messages" in job:
        return dict(job)
    if not isinstance(job["prompt"], str):
        raise click.UsageError("--chat needs prompts of text, not of token ids")
    before = [{"role": "system", "content": system}] if system else []
    rest = {key: value for key, value in job.items() if key != "prompt"}
    return {"messages": [*before, {"role": "user", "content": job["prompt"]}], **rest}


def _answers(
    draft: Draft, jobs: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any], *, progress: bool
) -> list[Any]:
    """The engine's outputs, in the order of the jobs."""
    from modulm.contracts.sampling import SamplingParams
    from modulm_frontend.llm import LLM

    given = {name: sampling[name] for name in _SAMPLING if sampling[name] not in (None, ())}
    params = SamplingParams(**given)
    chats = [job["messages"] for job in jobs if "messages" in job]
    texts = [_prompt(job["prompt"]) for job in jobs if "prompt" in job]
    with LLM.from_config(draft.config) as engine:
        chatted: list[Any] = engine.chat(chats, params, use_tqdm=progress) if chats else []
        written: list[Any] = engine.generate(texts, params, use_tqdm=progress) if texts else []
    of_chats, of_texts = iter(chatted), iter(written)
    return [next(of_chats if "messages" in job else of_texts) for job in jobs]


def _prompt(prompt: Any) -> Any:
    return {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt


def _text(answer: Any) -> str:
    return "".join(f"{output.text}\n" for output in answer.outputs)


def _line(job: Mapping[str, Any], answer: Any) -> str:
    outputs = [
        {"text": one.text, "finish_reason": one.finish_reason, "tokens": len(one.token_ids)}
        for one in answer.outputs
    ]
    prompt = len(answer.prompt_token_ids or ())
    row = {**job, "outputs": outputs, "prompt_tokens": prompt}
    return json.dumps(row, ensure_ascii=False) + "\n"
