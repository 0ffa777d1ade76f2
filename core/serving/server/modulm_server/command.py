"""`modulm serve [MODEL ...]`: the OpenAI-compatible server."""

from __future__ import annotations

import os
import signal
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import click

from modulm.errors import ConfigError
from modulm_cli import FlagCommand, print_notices
from modulm_server.models import serves_several

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from modulm.config.sources import Draft
    from modulm_server.engine.spawn import EngineProcess

__all__ = ["command"]

#: Seconds until a lost signal is sent again.
_AGAIN = 0.1
#: Signals that end the server after a drain.
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
#: Where the context has the engine's process that was started early.
_PROCESS = "modulm_server.process"
#: Arguments with which the command starts no engine for one model in a process of its own.
_WITHOUT_ENGINE = ("-h", "--help", "--dry-run", "--disable-frontend-multiprocessing", "--headless")
#: Beginnings of flags with which the engine loads no model itself, or there are several engines.
_SEVERAL = ("--models-", "--tensor-", "--pipeline-", "--data-parallel", "-tp", "-pp", "-dp")


class _ServeCommand(FlagCommand):
    """Starts the engine's process before it reads the flags, since that takes longest to get ready.

    The command finds it in the context, which ends a process that is not used.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        process = ctx.meta[_PROCESS] = _likely_process(args)
        if process is not None:
            ctx.call_on_close(process.close)
        try:
            return super().parse_args(ctx, args)
        except BaseException:
            ctx.close()
            raise


def _likely_process(args: Sequence[str]) -> EngineProcess | None:
    """The process of the engine that the arguments seem to ask for, None for another way to serve.

    What else decides, such as a file of flags, is known once they are read.
    """
    if any(arg in _WITHOUT_ENGINE or arg.startswith(_SEVERAL) for arg in args):
        return None
    from modulm_server.engine.spawn import EngineProcess

    return EngineProcess(loads_model=True)


@click.command("serve", cls=_ServeCommand, server=True)
@click.argument("model_tags", nargs=-1, metavar="[MODEL]...")
@click.option("--dry-run", is_flag=True, help="Show what the model needs in memory, and exit.")
def command(draft: Draft, model_tags: tuple[str, ...], dry_run: bool) -> None:
    """Serve models over HTTP, with the APIs of OpenAI, Anthropic and Ollama.

    MODEL is a folder, a Hugging Face id or a short name; without one the embedded model answers.
    Requests choose between several by name. --models-config and --models-dir add more.
    """
    if dry_run:
        _show_memory(draft, model_tags)
        return
    from modulm_server.engine.spawn import EngineProcess

    termination = _Termination()
    in_process = draft.config.parallel.disable_frontend_multiprocessing
    several = serves_several(draft.config, model_tags)
    process: EngineProcess | None = click.get_current_context().meta[_PROCESS]
    try:
        alone = draft.config.parallel.ranks == 1
        if process is not None and (in_process or several or not alone):
            process.close()
            process = None
        if process is None and not (in_process or several):
            process = EngineProcess(loads_model=alone)
        if several:
            code = _serve_several(draft, model_tags, termination)
        else:
            code = _serve(draft, process, termination)
    except _Terminated:
        for number in _ENDINGS:
            signal.signal(number, signal.SIG_IGN)  # already shutting down
        code = 128 + signal.SIGTERM
    finally:
        if process is not None:
            process.close()
    raise SystemExit(code)


def _show_memory(draft: Draft, model_tags: tuple[str, ...]) -> None:
    """Print what `modulm fit` prints. Raises SystemExit if the model does not fit."""
    from modulm_memory.report import report

    if serves_several(draft.config, model_tags):
        raise ConfigError("dry_run", "shows one model: run modulm fit for each of them")
    print_notices(draft.notices)
    text, fits = report(draft.config, draft.explicit)
    click.echo(text)
    if not fits:
        raise SystemExit(1)


class _Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived. Not a SystemExit: guards would attribute that to a plugin."""


class _Termination:
    """Handles SIGTERM and SIGHUP until the server is ready and installs its own handler.

    Exceptions of a handler are lost in destructors and weak reference callbacks, which every import
    has; the signal is then sent again. If code that catches all exceptions swallowed it, the
    server ends as soon as it is ready.
    """

    def __init__(self) -> None:
        self._came = False
        self._unraisable = sys.unraisablehook
        sys.unraisablehook = self._resend_lost_signal
        signal.signal(signal.SIGUSR2, lambda *_: None)  # nothing to restart yet
        for number in _ENDINGS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
                signal.signal(number, self._terminated)

    def _terminated(self, number: int, frame: FrameType | None) -> NoReturn:
        self._came = True
        raise _Terminated

    def _resend_lost_signal(self, lost: sys.UnraisableHookArgs) -> None:
        if not issubclass(lost.exc_type, _Terminated):
            self._unraisable(lost)
            return
        again = threading.Timer(_AGAIN, os.kill, (os.getpid(), signal.SIGTERM))
        again.daemon = True
        again.start()

    def ready(self, banner: str) -> None:
        """Print the banner; the server is ready and has its own handlers."""
        click.echo(banner)
        if self._came:
            signal.raise_signal(signal.SIGTERM)


def _serve_several(draft: Draft, models: Sequence[str], termination: _Termination) -> int:
    """Run a server of several models; returns its exit code."""
    from modulm_server.flags import ServerConfig
    from modulm_server.logs import configure_logging
    from modulm_server.models.serve import serve_models
    from modulm_server.output import unblock

    unblock()
    server = draft.config.group(ServerConfig)
    configure_logging(draft.config, server.disable_access_log_for_endpoints or ())
    print_notices(draft.notices)
    named = [draft.config.model.model] if not models and "model" in draft.origins else models
    return serve_models(draft.config, named, termination.ready)


def _serve(draft: Draft, process: EngineProcess | None, termination: _Termination) -> int:
    """Run the server; returns its exit code. process: prepares for the engine meanwhile."""
    from modulm_fleet.placement import placement
    from modulm_server.app import import_routes
    from modulm_server.engine.async_llm import AsyncLLM
    from modulm_server.flags import ServerConfig
    from modulm_server.logs import configure_logging
    from modulm_server.output import unblock
    from modulm_server.serve import serve

    unblock()
    server = draft.config.group(ServerConfig)
    configure_logging(draft.config, server.disable_access_log_for_endpoints or ())
    print_notices(draft.notices)
    if "model" not in draft.origins:
        click.echo(
            "No model given: serving the small embedded one. "
            "`modulm serve MODEL` serves a folder or a Hugging Face id.",
            err=True,
        )
    placed = placement(draft.config)
    if placed.headless:
        from modulm.plugins import manager
        from modulm_server.headless import serve_headless

        if process is not None:
            process.close()
        return serve_headless(draft.config, placed, manager.current())
    make_engine = partial(AsyncLLM.from_config, process=process, meanwhile=import_routes)
    return serve(draft.config, make_engine, termination.ready)
