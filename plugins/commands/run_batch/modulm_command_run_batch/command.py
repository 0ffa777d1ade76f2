"""The `run-batch` command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from modulm_cli import FlagCommand, print_notices

if TYPE_CHECKING:
    from modulm.config.sources import Draft

__all__ = ["command"]


@click.command("run-batch", cls=FlagCommand, server=True)
@click.option(
    "-i",
    "--input-file",
    required=True,
    metavar="FILE|URL",
    help="Batch requests, JSONL as OpenAI defines it.",
)
@click.option(
    "-o",
    "--output-file",
    required=True,
    metavar="FILE|URL",
    help="Output file, or a URL to upload it to by PUT.",
)
@click.option("--output-tmp-dir", metavar="DIR", help="Folder for the output until it is uploaded.")
@click.option("--enable-metrics", is_flag=True, help="Serve /metrics while running.")
@click.option(
    "--url",
    default="127.0.0.1",
    show_default=True,
    help="Address to serve metrics on, with --enable-metrics; --port sets the port.",
)
@click.option(
    "--resume/--no-resume",
    default=None,
    help="Continue an earlier run, even a finished one, and retry lines that failed; --no-resume "
    "starts over. Default: continue an interrupted run.",
)
@click.option("--no-progress", is_flag=True, help="Show no progress bar.")
def command(
    draft: Draft,
    input_file: str,
    output_file: str,
    output_tmp_dir: str | None,
    enable_metrics: bool,
    url: str,
    no_progress: bool,
    resume: bool | None,
) -> None:
    """Answer a file of OpenAI batch requests: chat, completions, embeddings.

    Writes one line for each request; an invalid one gets an error and does not affect the others.
    The output file appears when all are answered. Repeat the command to continue an interrupted
    run. Exits with 1 if lines failed.
    """
    from modulm_command_run_batch.run import run
    from modulm_server.flags import ServerConfig
    from modulm_server.logs import configure_logging
    from modulm_server.output import unblock

    unblock()
    server = draft.config.group(ServerConfig)
    configure_logging(draft.config, server.disable_access_log_for_endpoints or ())
    print_notices(draft.notices)
    address = (url, server.port) if enable_metrics else None
    paths = input_file, output_file, output_tmp_dir
    if run(draft.config, *paths, address, quiet=no_progress, resume=resume):
        raise SystemExit(1)
