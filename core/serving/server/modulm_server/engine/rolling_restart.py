"""Restarts the replicas of a front end one after another, without interrupting requests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from modulm.errors import EngineError

if TYPE_CHECKING:
    from modulm_server.engine.replica_processes import Replica

__all__ = ["RollingRestart"]

log = logging.getLogger("modulm.engine")

#: Seconds between two looks at a replica that drains or starts.
_LOOK = 0.1


class RollingRestart:
    """Restarts the replicas that this front end started, one at a time.

    A replica gets no more requests from any front end, finishes those it has, and then gets a new
    process, while another replica takes requests. If a new process does not start, the remaining
    replicas are not restarted.

    drain: stops sending requests to the replica at an index. restart: replaces its process. ended:
    set when the front end closes.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        drain: Callable[[int], None],
        restart: Callable[[int], None],
        ended: threading.Event,
    ) -> None:
        self._drain, self._replace = drain, restart
        self._replicas = replicas
        self._ended = ended
        self._running = threading.Lock()

    def start(self, headless: bool) -> None:
        """Start in the background; does nothing if one is in progress. headless: do not wait for
        other replicas, since they are on another machine.
        """
        if self._running.acquire(blocking=False):
            run = partial(self._run, headless)
            threading.Thread(target=run, name="modulm-rolling", daemon=True).start()

    def _run(self, headless: bool) -> None:
        try:
            for index, replica in enumerate(self._replicas):
                if replica.start is not None and not self._restart(index, replica, headless):
                    return
            log.warning("the rolling restart is complete")
        finally:
            self._running.release()

    def _restart(self, index: int, replica: Replica, headless: bool) -> bool:
        """Restart a replica; returns whether it takes requests again."""
        others = [other for other in self._replicas if other is not replica]
        while not (replica.up and (headless or any(other.up for other in others))):
            if self._ended.wait(_LOOK):
                return False
        rank, client = replica.address.rank, replica.client
        if client is None:
            return False
        log.warning("replica %d is restarted once its requests have ended", rank)
        self._drain(index)
        try:
            idle = client.retire()
            while not idle.done() and client.trouble() is None:
                if self._ended.wait(_LOOK):
                    return False
        except EngineError as error:
            log.warning("replica %d: %s", rank, error)
        self._replace(index)
        while replica.health.status != "ok":
            if self._ended.wait(_LOOK):
                return False
            if replica.failed:
                log.error("replica %d does not start: the others are not restarted", rank)
                return False
        return True
