"""Tells the router what replicas have cached, by the events that they publish."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from modulm_fleet.router import Router

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm_kv_events.subscriber import Subscriber

__all__ = ["CacheEvents"]

log = logging.getLogger("modulm.engine")


class CacheEvents:
    """Follows the KV events of replicas, if they publish any (`--kv-events-config`).

    lock: guards the router.
    """

    def __init__(self, lock: threading.Lock, router: Callable[[], Router]) -> None:
        self._lock, self._router = lock, router
        self._subscriber: Subscriber | None = None

    def follow(self, index: int, config: EngineConfig, where: str) -> None:
        """Follow a replica that has just started or been reached. where: its `Address.where`."""
        if not (config.value("kv_events_config") or {}).get("enable_kv_cache_events"):
            return
        from modulm_kv_events.subscriber import Subscriber, source_of

        # A path is a socket of this machine.
        host = "127.0.0.1" if where.startswith("/") else where.rpartition(":")[0]
        source = source_of(config, host)
        if isinstance(source, str):
            log.info("KV events of replica %d are not used to route requests: %s", index, source)
        elif source is not None:
            with self._lock:
                if self._subscriber is None:
                    self._subscriber = Subscriber(self._begin, self._apply, self._lose)
                self._subscriber.follow(index, source)

    def _begin(self, index: int) -> None:
        with self._lock:
            self._router().blocks.reset(index, complete=True)

    def _apply(self, index: int, events: Sequence[Any]) -> None:
        with self._lock:
            self._router().record_events(index, events)

    def _lose(self, index: int) -> None:
        with self._lock:
            self._router().blocks.reset(index, complete=False)

    def close(self) -> None:
        """Stop following. Do not hold the lock."""
        if self._subscriber is not None:
            self._subscriber.close()
