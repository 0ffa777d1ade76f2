"""The flags of KV events and of metrics of blocks, by vLLM's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attrs import field, frozen
from attrs.validators import ge, in_, optional

from modulm.contracts.flags import FlagGroup, flag, flag_group, read_mapping
from modulm.errors import ConfigError
from modulm.structure import Problem, structure_table

__all__ = ["KVCacheMetricsConfig", "KVEventsConfig", "Settings"]

#: Addresses that sockets are bound to; a TCP port is moved by the replica's number.
_ENDPOINT = re.compile(r"tcp://(?P<host>[^/]+):(?P<port>[0-9]{1,5})|(?:ipc|inproc)://.+")


@frozen
class Settings:
    """vLLM's KVEventsConfig.

    endpoint, replay_endpoint: ZeroMQ addresses. buffer_steps: batches kept for replay. hwm: batches
    that wait for a slow subscriber before its next ones are dropped. max_queue_size: batches that
    wait for the publishing thread. topic: first frame of each message. event_format: "map", or
    "array" for routers that know older versions of vLLM only; vLLM has no such key.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = field(default=None, validator=optional(in_(("zmq", "null"))))
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = field(default=10_000, validator=ge(0))
    hwm: int = field(default=100_000, validator=ge(0))
    max_queue_size: int = field(default=100_000, validator=ge(1))
    topic: str = ""
    event_format: str = field(default="map", validator=in_(("map", "array")))

    @property
    def active(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    def of_replica(self, rank: int) -> tuple[str, str | None]:
        """Return the two endpoints of a replica: ports and paths count up from those of rank 0."""
        replay = self.replay_endpoint
        return _moved(self.endpoint, rank), None if replay is None else _moved(replay, rank)


def _moved(endpoint: str, rank: int) -> str:
    if not rank:
        return endpoint
    if not endpoint.startswith("tcp:"):
        return f"{endpoint}_dp{rank}"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}"


def _events(value: Any) -> Mapping[str, Any]:
    """Check vLLM's table. Raises ConfigError that names the key."""
    table = read_mapping("kv_events_config", value)
    try:
        settings = structure_table(table, Settings)
    except Problem as problem:
        raise ConfigError("kv_events_config", str(problem)) from None
    for key in ("endpoint", "replay_endpoint"):
        address = getattr(settings, key)
        match = None if address is None else _ENDPOINT.fullmatch(address)
        if address is not None and match is None:
            message = f"{key}: {address!r} is not tcp://HOST:PORT, ipc://PATH or inproc://NAME"
            raise ConfigError("kv_events_config", message)
        if match is not None and match["port"] and not 0 < int(match["port"]) < 1 << 16:
            message = f"{key}: routers must know the port; use one from 1 to 65535"
            raise ConfigError("kv_events_config", message)
    return table


@flag_group
class KVEventsConfig(FlagGroup):
    """Events of the KV cache, for routers that know what each engine has cached."""

    title = "KVEventsConfig"

    kv_events_config: Mapping[str, Any] = flag(
        {},
        "Publish which blocks the prefix cache stores and evicts, as in vLLM: "
        "enable_kv_cache_events, publisher (zmq or null), endpoint, replay_endpoint, buffer_steps, "
        "hwm, max_queue_size, topic; event_format (map, or array for old routers).",
        parse=_events,
    )


@flag_group
class KVCacheMetricsConfig(FlagGroup):
    """Metrics of how long blocks stay in the prefix cache."""

    title = "KVCacheMetricsConfig"

    kv_cache_metrics: bool = flag(
        False,
        "Measure how long blocks stay in the prefix cache, stay unused before they are evicted, "
        "and how often they are used: the histograms kv_block_*_seconds of /metrics.",
    )
    kv_cache_metrics_sample: float = flag(
        0.01,
        "Fraction of the blocks that --kv-cache-metrics measures, more than 0.",
        least=0,
        most=1,
    )
