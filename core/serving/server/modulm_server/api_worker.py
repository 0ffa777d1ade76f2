"""The main module of an additional server process; see `api_workers`."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys

from modulm.config.environ import variables
from modulm_server.app import create_app
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.flags import ServerConfig
from modulm_server.heap import bound_arenas, share_interpreter
from modulm_server.logs import configure_logging
from modulm_server.output import unblock
from modulm_server.serve import make_server

__all__ = ["main"]

log = logging.getLogger("modulm_server")


def main(descriptor: int, address: str) -> int:
    """Serve requests from the socket until stopped or the engine ends; returns the exit status."""
    for number in (signal.SIGINT, signal.SIGHUP):  # of the terminal, for the owner
        signal.signal(number, signal.SIG_IGN)
    bound_arenas(variables())
    share_interpreter()
    unblock()
    engine = AsyncLLM.connect(address)
    config = engine.info.config
    configure_logging(config, config.group(ServerConfig).disable_access_log_for_endpoints or ())
    served = create_app(engine, config)
    server = make_server(served, config.group(ServerConfig))
    log.info("Server process %d is ready", os.getpid())
    gc.freeze()
    try:
        server.serve_on(socket.socket(fileno=descriptor))
        return 1 if engine.dead else 0
    finally:
        engine.shutdown()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
