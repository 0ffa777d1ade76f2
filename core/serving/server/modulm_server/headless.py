"""`modulm serve --headless`: runs replicas for a front end on another machine."""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from modulm.errors import EngineDead
from modulm_fleet.announce import announce
from modulm_fleet.flags import FleetConfig
from modulm_fleet.secret import secret_file
from modulm_server.engine.replica_processes import listening
from modulm_server.engine.replicas import ReplicaSet
from modulm_server.heap import bound_arenas

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.plugins.manager import PluginManager
    from modulm_fleet.placement import Placement

__all__ = ["serve_headless"]

log = logging.getLogger("modulm_server")

#: Seconds between two checks for the end.
_LOOK = 0.25


def serve_headless(config: EngineConfig, placed: Placement, plugins: PluginManager) -> int:
    """Announce and run the replicas until SIGTERM, SIGHUP or Ctrl-C; returns the exit code.

    If the front end ends, the replicas keep running and are announced to the next one. SIGUSR2
    restarts the replicas one after another.
    """
    from modulm.config.environ import variables

    bound_arenas(variables())
    ending = threading.Event()
    peer = announce(config, placed, plugins)
    died: list[EngineDead] = []
    file = config.group(FleetConfig).data_parallel_secret_file
    listeners = listening(placed, peer.getsockname()[0])
    replicas = ReplicaSet.open(
        config, plugins, lambda item: None, died.append, placed,
        listeners=listeners,
        secret_file=secret_file(placed.address[0], file),
    )  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: ending.set())
    signal.signal(signal.SIGUSR2, lambda *_: replicas.rolling_restart(headless=True))
    log.warning(
        "Replicas %d to %d serve the front end at %s:%d",
        placed.here.start,
        placed.here.stop - 1,
        *placed.address,
    )
    keeper = threading.Thread(
        target=_keep, args=(peer, ending, config, placed, plugins), daemon=True
    )
    keeper.start()
    try:
        while not ending.wait(_LOOK) and not died:
            pass
    finally:
        replicas.close()
        for listener in listeners:
            listener.close()
    return 1 if died else 0


def _keep(
    peer: socket.socket,
    ending: threading.Event,
    config: EngineConfig,
    placed: Placement,
    plugins: PluginManager,
) -> None:
    """Announce the replicas again whenever the front end disconnects; runs in a thread."""
    while not ending.is_set():
        with suppress(OSError):
            peer.recv(1)
        peer.close()
        try:
            peer = announce(config, placed, plugins)
        except Exception as error:
            log.error("%s", error)
            time.sleep(1.0)
