"""Runs a batch from its input file to its output file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from secrets import token_urlsafe
from typing import Any

import click
import uvicorn
from tqdm import tqdm

from modulm.config import EngineConfig
from modulm_command_run_batch.batch import EngineGone, Line, answer_all, read_lines
from modulm_command_run_batch.files import Answers, check_files, is_url, open_lines_of, upload
from modulm_server.app import Served, create_app
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.flags import ServerConfig

__all__ = ["run"]

#: Requests submitted to the engine per running one, so that it never waits for the next.
_AHEAD = 2


def run(
    config: EngineConfig,
    source: str,
    output: str,
    directory: str | None,
    metrics: tuple[str, int] | None,
    *,
    quiet: bool,
    resume: bool | None = None,
) -> int:
    """Answer the lines of `source` that have no answer yet, and write `output`; returns the
    failures.

    Raises click.ClickException for files that cannot be read or written, or are the same.
    """
    check_files(source, output, directory)
    raw = open_lines_of(source)
    lines = read_lines(raw)
    with Answers(output, raw, directory, resume) as answers:
        if resume:
            answers.take_finished(lines)
        open_lines = [(i, line) for i, line in enumerate(lines) if i not in answers.done]
        if len(open_lines) < len(lines):
            click.echo(f"{len(answers.done)} of {len(lines)} lines are already answered", err=True)
        if open_lines:
            try:
                asyncio.run(_run(config, open_lines, len(lines), answers, metrics, quiet))
            except KeyboardInterrupt:
                click.echo("stopped; repeat the command to continue", err=True)
                raise
            except ExceptionGroup as errors:
                raise _explained(errors) from errors
        path, failed = answers.finish()
    if is_url(output):
        upload(path, output)
        path.unlink()
    good = len(lines) - failed
    click.echo(f"{len(lines)} requests: {good} answered, {failed} failed; see {output}", err=True)
    return failed


def _explained(errors: ExceptionGroup) -> Exception:
    """Combine the errors of a batch's tasks into one."""
    error: Exception = errors
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    again = "the same command goes on from here"
    if isinstance(error, OSError):
        return click.ClickException(f"answers cannot be written: {error.strerror}; {again}")
    if isinstance(error, EngineGone):
        return click.ClickException(f"{error}; {again}")
    return errors


async def _run(
    config: EngineConfig,
    lines: list[tuple[int, Line]],
    total: int,
    answers: Answers,
    metrics: tuple[str, int] | None,
    quiet: bool,
) -> None:
    # The file is the queue, so the engine's is unbounded.
    engine = AsyncLLM.from_config(
        config.with_(max_num_queued_reqs=None, max_num_queued_tokens=None)
    )
    try:
        final, key = _own_key(engine.info.config)
        served = create_app(engine, final)
        rows = engine.info.config.scheduler.max_num_seqs or 1
        with tqdm(total=total, initial=total - len(lines), unit="request", disable=quiet) as bar:

            def done(number: int, answer: dict[str, Any]) -> None:
                answers.add(number, answer)
                bar.update()

            async with _metrics(served, metrics):
                await answer_all(
                    served,
                    lines,
                    at_once=_AHEAD * rows,
                    key=key,
                    done=done,
                )
        await served.stop()
    finally:
        engine.shutdown()


def _own_key(config: EngineConfig) -> tuple[EngineConfig, str | None]:
    """If the configuration has API keys, add one that only this process knows."""
    server = config.group(ServerConfig)
    keys = server.api_key or ()
    if not keys and server.api_key_file is None and server.api_keys_file is None:
        return config, None
    key = token_urlsafe()
    return config.with_(api_key=(*keys, key)), key


class _Quiet(uvicorn.Server):
    """A server that leaves the handling of Ctrl-C to the batch."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def _metrics(served: Served, address: tuple[str, int] | None) -> AsyncIterator[None]:
    """Serve only /metrics while the batch runs."""
    if address is None:
        yield
        return

    async def only_metrics(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] != "/metrics":
            scope = {**scope, "path": "/not-served", "raw_path": b"/not-served"}
        await served.app(scope, receive, send)

    host, port = address
    server = _Quiet(uvicorn.Config(only_metrics, host, port, lifespan="off", log_config=None))
    task = asyncio.create_task(server.serve())
    try:
        yield
    finally:
        server.should_exit = True
        await task
