"""Serves several models: `modulm serve A B`, `--models-config`, `--models-dir`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

from modulm.config.environ import variables
from modulm.errors import ConfigError
from modulm_server.app import create_app
from modulm_server.flags import ServerConfig
from modulm_server.heap import bound_arenas, share_interpreter
from modulm_server.models.dispatch import Dispatcher
from modulm_server.models.front_engine import FrontEngine
from modulm_server.models.pool import ModelPool
from modulm_server.models.settings import read_settings
from modulm_server.serve import (
    check_exposure,
    check_files,
    make_server,
    open_socket,
    url_of,
    with_http_address,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from modulm.contracts.config import EngineConfig

__all__ = ["make_pool", "serve_models"]


def make_pool(config: EngineConfig, models: Sequence[str]) -> ModelPool:
    """Create the models of a server, none of them loaded. Raises ConfigError."""
    if config.parallel.disable_frontend_multiprocessing:
        raise ConfigError(
            "disable_frontend_multiprocessing", "leave it out: each model is a process of its own"
        )
    if (config.group(ServerConfig).api_server_count or 1) > 1:
        raise ConfigError("api_server_count", "a server of several models has one server process")
    return ModelPool(config, lambda: read_settings(config, models))


def serve_models(
    config: EngineConfig, models: Sequence[str], announce: Callable[[str], None]
) -> int:
    """Serve until SIGTERM, SIGHUP or Ctrl-C; returns the exit code of the process.

    announce: called with the banner, when the models that are loaded at start are loaded. Raises
    ConfigError for wrong settings, and for an address that cannot be used or needs a key.
    """
    check_exposure(config.group(ServerConfig))
    check_files(config.group(ServerConfig))
    bound_arenas(variables())
    config = with_http_address(config)
    server_config = config.group(ServerConfig)
    share_interpreter()
    pool = make_pool(config, models)
    sock = open_socket(server_config)
    try:
        engine = FrontEngine(pool, config, pool.names)
        try:
            served = create_app(engine, config, Dispatcher(pool))
            server = make_server(served, server_config)
            url = url_of(server_config, sock)
            server.announce = lambda: announce(_banner(pool, url))
            gc.freeze()  # makes full garbage collections faster
            server.serve_on(sock)
            return 1 if server.failed else 0
        finally:
            engine.shutdown()
    finally:
        sock.close()
        if server_config.uds is not None:
            Path(server_config.uds).unlink(missing_ok=True)


def _banner(pool: ModelPool, url: str) -> str:
    """The text that the server prints when it is ready."""
    statuses = pool.all_statuses()
    width = max((len(status.name) for status in statuses), default=0)
    number = f"{len(statuses)} models are" if statuses else "No models are there yet to be"
    lines = [f"{number} served at {url}"]
    for status in statuses:
        error = f" ({status.error})" if status.error else ""
        lines.append(f"  {status.name:{width}}  {status.state}{error}")
    if pool.budget is not None:
        lines.append(f"  memory budget: {pool.budget >> 20} MiB")
    return "\n".join([*lines, f"  page        {url}/", "  stop        Ctrl-C"])
