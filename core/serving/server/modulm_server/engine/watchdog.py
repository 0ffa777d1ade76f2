"""Acts on an engine that stalls."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from modulm.errors import EngineDead, EngineStalled
from modulm_server.engine.heartbeat import interval_of
from modulm_server.flags import ServerConfig, WatchdogConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from modulm_server.engine.core_client import EngineCoreClient

__all__ = ["Watchdog"]

log = logging.getLogger("modulm.engine")


class Watchdog:
    """Watches an engine on a thread and acts as `--watchdog-config` says.

    changed: called with an error when the engine stalls, with None when it recovers. died: called
    when the engine is given up.
    """

    def __init__(
        self,
        core: EngineCoreClient,
        changed: Callable[[EngineStalled | None], None],
        died: Callable[[EngineDead], None],
    ) -> None:
        config = core.info.config
        self._core = core
        self._changed = changed
        self._died = died
        self._timeout = config.group(ServerConfig).engine_heartbeat_timeout
        self._config = config.group(WatchdogConfig)
        #: With --restart an engine that stalls is killed by `ReplicaSet`, and restarted.
        self._exits = self._config.action == "exit" and not config.group(ServerConfig).restart
        self._interval = interval_of(config)
        self._since: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="modulm-watchdog", daemon=True)
        if self._timeout:
            self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(self._interval):
            now = time.monotonic()
            if now - before > self._interval + self._timeout / 2:
                self._core.forget_silence()
            else:
                self._look(now)
            before = now

    def _look(self, now: float) -> None:
        reason = self._core.trouble()
        if reason is None:
            if self._since is not None:
                log.warning("the engine responds again, after %.0f s", now - self._since)
                self._since = None
                self._changed(None)
        elif self._since is None:
            self._since = now
            log.error("the engine does not respond: %s", reason)
            self._changed(EngineStalled(f"the engine does not respond: {reason}"))
            if self._config.dump_stacks:
                self._core.dump_stacks()
        elif self._exits and now - self._since >= self._config.timeout:
            self._ended.set()
            if self._core.kill():
                log.critical("the engine is given up: %s", reason)
                self._died(EngineDead(f"the engine was given up: {reason}"))
