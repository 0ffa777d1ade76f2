"""`modulm bench serve`: requests against a running server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np
from attrs import evolve, frozen
from tqdm import tqdm

from modulm.config import EngineConfig
from modulm_cli.client_key import client_key
from modulm_command_bench.drafts import Drafts, of_server
from modulm_command_bench.figures import Timed, figures, parse_goodput, save, table
from modulm_command_bench.load import BACKENDS, Schedule, Target, arrivals, run
from modulm_command_bench.samples import Recipe, Sample, make_samples

__all__ = ["Settings", "bench"]


@frozen(kw_only=True)
class Settings:
    """The flags of one run besides prompts and schedule."""

    backend: str
    base_url: str
    endpoint: str | None
    model: str | None
    served_model_name: str | None
    lora_modules: Sequence[str]
    tokenizer: str | None
    tokenizer_mode: str
    trust_remote_code: bool
    headers: Sequence[str]
    extra_body: str | None
    sampling: dict[str, Any]
    ignore_eos: bool
    max_concurrency: int | None
    metrics: Sequence[str]
    percentiles: Sequence[float]
    goodput: Sequence[str]
    warmups: int
    ready_timeout: float
    quiet: bool
    label: str | None
    metadata: Sequence[str]
    detailed: bool


def bench(settings: Settings, recipe: Recipe, schedule: Schedule) -> dict[str, Any]:
    """Run the benchmark; returns the result in vLLM's format. Raises click errors."""
    limits = parse_goodput(settings.goodput)
    _wait_ready(settings)
    target = _target(settings)
    samples = make_samples(recipe, _tokenizer(settings, target.model))
    if target.takes_messages or settings.backend.startswith("infinity"):
        samples = _with_text(samples, _tokenizer(settings, target.model))
    elif any(s.media or s.content for s in samples) and not target.path.endswith("/transcriptions"):
        raise click.UsageError(
            f"--dataset-name {recipe.name} needs --backend openai-chat, or another one for messages"
        )
    _check_kind(recipe, target, samples)
    samples = _with_adapters(samples, settings.lora_modules, schedule.seed)
    times = arrivals(schedule, samples)
    done, seconds, drafts = asyncio.run(_measure(settings, target, samples, times))
    results = figures(
        done,
        seconds,
        metrics=settings.metrics,
        percentiles=settings.percentiles,
        goodput=limits,
    )
    results |= drafts.figures()
    _report_errors(done)
    click.echo(table(results))
    return {**_about(settings, target, recipe, schedule), **results, **_details(settings, done)}


async def _measure(
    settings: Settings, target: Target, samples: Sequence[Sample], times: Sequence[float]
) -> tuple[list[Timed], float, Drafts]:
    """Send a test request and warm-ups, then run the benchmark."""
    first, _ = await run(target, samples[:1], [0.0])
    if first[0].error:
        raise click.ClickException(f"the first request failed: {first[0].error}")
    if settings.warmups:
        await run(target, [samples[0]] * settings.warmups, [0.0] * settings.warmups)
    with tqdm(total=len(samples), unit="request", disable=settings.quiet) as bar:
        before = of_server(target.base, target.headers)
        done, seconds = await run(
            target,
            samples,
            times,
            concurrency=settings.max_concurrency,
            finished=lambda _: bar.update(),
        )
        after = before and of_server(target.base, target.headers)
    return done, seconds, after.since(before) if before and after else Drafts()


def _wait_ready(settings: Settings) -> None:
    """Wait until the server answers, at most the given seconds. Announces the wait."""
    import time

    end = time.monotonic() + settings.ready_timeout
    announced = False
    while True:
        try:
            answer = httpx.get(f"{settings.base_url}/health", timeout=5)
            if answer.is_success or answer.status_code == httpx.codes.NOT_FOUND:
                return
            reason = f"/health answers {answer.status_code}"
        except httpx.HTTPError as error:
            reason = str(error)
        if time.monotonic() >= end:
            raise click.ClickException(f"no server at {settings.base_url}: {reason}")
        if not announced:
            click.echo(
                f"no server at {settings.base_url} yet ({reason}): waiting for it, at most "
                f"{settings.ready_timeout:.0f} s (--ready-check-timeout-sec)",
                err=True,
            )
            announced = True
        time.sleep(0.2)


def _target(settings: Settings) -> Target:
    key = client_key()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for header in settings.headers:
        name, equals, value = header.partition("=")
        if not equals:
            raise click.UsageError(f"--header {header}: write NAME=VALUE")
        headers[name] = value
    model_name = settings.served_model_name or settings.model
    model = model_name or _first_model(settings.base_url, headers)
    extra = {k: v for k, v in settings.sampling.items() if v is not None}
    return Target(
        base=settings.base_url,
        path=settings.endpoint or BACKENDS[settings.backend],
        model=model,
        headers=headers,
        extra={**extra, **_extra(settings.extra_body)},
        ignore_eos=settings.ignore_eos,
        backend=settings.backend,
    )


def _extra(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        extra = json.loads(text)
    except json.JSONDecodeError as error:
        raise click.UsageError(f"--extra-body is not valid JSON: {error}") from error
    if not isinstance(extra, dict):
        raise click.UsageError("--extra-body is not a JSON object")
    return extra


def _first_model(base: str, headers: dict[str, str]) -> str:
    answer = httpx.get(f"{base}/v1/models", headers=headers)
    models = answer.json().get("data", []) if answer.is_success else []
    if not models:
        raise click.ClickException(f"{base} lists no model; set --model")
    return str(models[0]["id"])


def _tokenizer(settings: Settings, model: str) -> Any:
    """Load the tokenizer of `--tokenizer`, `--model` or the served model, the first that is set."""
    from modulm.errors import ModulmError
    from modulm.loading import open_checkpoint
    from modulm.plugins import current
    from modulm_tokenizers.tokenizer import open_tokenizer

    name = settings.tokenizer or settings.model or model
    config = EngineConfig.from_keywords(
        model=name,
        tokenizer_mode=settings.tokenizer_mode,
        trust_remote_code=settings.trust_remote_code,
    )
    try:
        path = name if Path(name).is_dir() else str(open_checkpoint(config, current()).path)
        return open_tokenizer(config, path)
    except ModulmError as error:
        raise click.ClickException(f"no tokenizer for {name}: {error}; give --tokenizer") from error


def _with_text(samples: Sequence[Sample], tokenizer: Any) -> list[Sample]:
    """Decode prompts of ids to text, for chat messages."""
    return [
        sample if sample.text is not None else evolve(sample, text=tokenizer.decode(sample.ids))
        for sample in samples
    ]


def _with_adapters(samples: Sequence[Sample], names: Sequence[str], seed: int) -> list[Sample]:
    """Assign adapters to requests at random."""
    if not names:
        return list(samples)
    drawn = np.random.default_rng(seed % 2**64).integers(len(names), size=len(samples))
    return [evolve(s, model=names[n]) for s, n in zip(samples, drawn.tolist(), strict=True)]


def _check_kind(recipe: Recipe, target: Target, samples: Sequence[Sample]) -> None:
    """Raise click.UsageError if the API cannot take the samples."""
    if any(sample.documents for sample in samples) != target.path.endswith("/rerank"):
        raise click.UsageError("--dataset-name random-rerank and --backend vllm-rerank go together")
    sounds = [sum("audio_url" in part for part in sample.media) for sample in samples]
    if target.path.endswith("/transcriptions") and set(sounds) != {1}:
        raise click.UsageError(
            f"--backend openai-audio needs one sound per prompt: --dataset-name {recipe.name} has "
            "other ones; use custom_audio"
        )


def _report_errors(done: Sequence[Timed]) -> None:
    errors: dict[str, int] = {}
    for timed in done:
        if timed.error:
            errors[timed.error] = errors.get(timed.error, 0) + 1
    for error, count in sorted(errors.items(), key=lambda item: -item[1])[:5]:
        click.echo(f"{count} failed: {error}", err=True)


def _about(
    settings: Settings, target: Target, recipe: Recipe, schedule: Schedule
) -> dict[str, Any]:
    rate = schedule.rate if schedule.rate != float("inf") else "inf"
    pairs = dict(item.partition("=")[::2] for item in settings.metadata)
    return {
        "date": datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        "backend": settings.backend,
        "label": settings.label or settings.backend,
        "model_id": target.model,
        "tokenizer_id": settings.tokenizer or settings.model or target.model,
        "dataset_name": recipe.name,
        "num_prompts": recipe.count,
        "request_rate": rate,
        "burstiness": schedule.burstiness,
        "max_concurrency": settings.max_concurrency,
        **({"lora_modules": list(settings.lora_modules)} if settings.lora_modules else {}),
        **pairs,
    }


def _details(settings: Settings, done: Sequence[Timed]) -> dict[str, Any]:
    if not settings.detailed:
        return {}
    return {
        "input_lens": [timed.input_len for timed in done],
        "output_lens": [timed.output_len for timed in done],
        "ttfts": [timed.ttft for timed in done],
        "itls": [list(timed.gaps) for timed in done],
        "generated_texts": [timed.text for timed in done],
        "errors": [timed.error or "" for timed in done],
    }


def result_file(result: dict[str, Any], directory: str | None, name: str | None) -> str:
    """The default file name of a result: label, rate, model and date."""
    if name is None:
        model = str(result["model_id"]).rsplit("/", 1)[-1]
        several = result["max_concurrency"]
        concurrency = f"-concurrency{several}" if several else ""
        rate = f"{result['request_rate']}qps{concurrency}"
        name = f"{result['label']}-{rate}-{model}-{result['date']}.json"
    return str(Path(directory or ".") / name)


def save_result(
    result: dict[str, Any], directory: str | None, name: str | None, *, append: bool
) -> None:
    """Write the result to the file of the options."""
    save(result_file(result, directory, name), result, append=append)
