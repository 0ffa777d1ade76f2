"""The server's own metrics: requests by route, with a fixed set of labels."""

from __future__ import annotations

from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from modulm.plugins import manager
from modulm.plugins.index import is_first_party
from modulm_server.output import dropped_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from starlette.types import Scope

__all__ = [
    "HttpMetrics", "MediaCacheMetrics", "OperationMetrics", "ToolCallMetrics", "exposition",
    "joined", "merged", "of_model", "with_prefixes",
]  # fmt: skip

#: Gauges to add up over processes. Of other gauges, the scraped process's value is used.
_ADDITIVE = frozenset(
    {"process_open_fds", "process_resident_memory_bytes", "process_virtual_memory_bytes"}
)
#: Gauges whose information is in their labels; each process has its own.
_LISTED = frozenset({"modulm:lora_requests_info"})
#: Gauges of the engine that only the server process that started it has.
_OF_FIRST = frozenset({"modulm:model_memory_bytes", "modulm:model_memory_beyond_estimate_bytes"})
#: Beginnings of the lines of the engine's metrics.
_ENGINE = ("modulm:", "# HELP modulm:", "# TYPE modulm:")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
#: Buckets of what may take minutes, in seconds.
_LONG = (0.01, 0.1, 1.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class _Dropped(Collector):
    """Counts dropped lines of output, of this process and of the engine's."""

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        text = "Log lines dropped because the output was not read."
        yield CounterMetricFamily("modulm:log_lines_dropped", text, value=dropped_lines())


class _Plugins(Collector):
    """Lists the usable third-party plugin packages."""

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        text = "Installed plugin packages of third parties."
        family = GaugeMetricFamily("modulm:plugin_info", text, labels=("distribution", "version"))
        plugins = manager.current()
        usable = (d for d in plugins.everything() if plugins.selection.permits(d))
        for name, version in sorted({(d.distribution, d.version) for d in usable}):
            if name and not is_first_party(name):
                family.add_metric((name, version), 1)
        yield family


class HttpMetrics:
    """Metrics of HTTP requests, labelled by route, never by a path that a client chose."""

    def __init__(self, registry: CollectorRegistry) -> None:
        ProcessCollector(registry=registry)
        registry.register(_Dropped())
        registry.register(_Plugins())
        self._requests = Counter(
            "http_requests",
            "Requests by route, method and status class.",
            ("handler", "method", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Time to the last byte of a response.",
            ("handler", "method"),
            buckets=_SECONDS,
            registry=registry,
        )
        self._sockets = Counter(
            "modulm:websocket_connections", "WebSockets that were opened.", registry=registry
        )
        self._open_sockets = Gauge(
            "modulm:websocket_connections_active", "Open WebSockets.", registry=registry
        )
        self._socket_seconds = Histogram(
            "modulm:websocket_connection_duration_seconds", "Time that a WebSocket was open.",
            buckets=_LONG, registry=registry,
        )  # fmt: skip

    def observe(self, scope: Scope, status: int, seconds: float) -> None:
        """Record a finished request."""
        route = scope.get("route")
        handler = route.path if route is not None and hasattr(route, "path") else "none"
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        self._seconds.labels(handler, method).observe(seconds)

    @contextmanager
    def socket(self) -> Iterator[None]:
        """Count a WebSocket while it is open."""
        self._sockets.inc()
        with self._open_sockets.track_inprogress(), self._socket_seconds.time():
            yield


class OperationMetrics:
    """Durations of the operations of one kind, and how many are in progress, by operation."""

    def __init__(self, registry: CollectorRegistry, kind: str, text: str) -> None:
        self._seconds = Histogram(
            f"modulm:{kind}_operation_duration_seconds", f"Time of one {text} operation.",
            ("operation",), buckets=_LONG, registry=registry,
        )  # fmt: skip
        self._running = Gauge(
            f"modulm:{kind}_operations_in_flight", f"{text.capitalize()} operations in progress.",
            ("operation",), registry=registry,
        )  # fmt: skip

    @contextmanager
    def measure(self, operation: str) -> Iterator[None]:
        """Record an operation, whether it succeeds or not."""
        running, seconds = self._running.labels(operation), self._seconds.labels(operation)
        with running.track_inprogress(), seconds.time():
            yield


class ToolCallMetrics(Collector):
    """Outputs that a tool parser read, by request, mode and whether it found calls."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], int] = {}

    def add(self, request_type: str, *, streamed: bool, called: bool) -> None:
        """Count a choice that has ended."""
        mode = "streaming" if streamed else "non_streaming"
        key = (mode, "tool_call" if called else "no_tool_call", request_type)
        self._counts[key] = self._counts.get(key, 0) + 1

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "modulm:tool_call_parser_invocations", "Choices that a tool parser read.",
            labels=("mode", "outcome", "request_type"),
        )  # fmt: skip
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family


class MediaCacheMetrics(Collector):
    """Look-ups in the cache of processed images, audio and video. counts: queries and hits."""

    def __init__(self, model_name: str, counts: Callable[[], tuple[int, int]]) -> None:
        self._labels, self._counts = (model_name, "0"), counts

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        texts = ("Items looked up in the media cache.", "Items found in the media cache.")
        for name, text, count in zip(("queries", "hits"), texts, self._counts(), strict=True):
            family = CounterMetricFamily(
                f"modulm:mm_cache_{name}", text, labels=("model_name", "engine")
            )
            family.add_metric(self._labels, count)
            yield family


def exposition(registry: CollectorRegistry) -> tuple[bytes, str]:
    """The metrics in Prometheus' text format, and its content type."""
    return _text(joined(registry.collect())), CONTENT_TYPE_LATEST


def joined(metrics: Iterable[Metric]) -> Iterable[Metric]:
    """Metrics of which several may have one name, as one for each name, with all samples."""
    families: dict[str, Metric] = {}
    for metric in metrics:
        if metric.name in families:
            families[metric.name].samples.extend(metric.samples)
        else:
            families[metric.name] = copy(metric)
            families[metric.name].samples = list(metric.samples)
    return families.values()


def of_model(name: str, metrics: Iterable[Metric]) -> Iterator[Metric]:
    """Add the label `model_name` to samples that do not have it."""
    for metric in metrics:
        labelled = copy(metric)
        labelled.samples = [
            sample._replace(labels={"model_name": name, **sample.labels})
            for sample in metric.samples
        ]
        yield labelled


def merged(this_process: bytes, others: Sequence[str], shared: Collection[str]) -> bytes:
    """Merge the metrics of several server processes.

    this_process, others: expositions. Counters and histograms are added up. Those named in `shared`
    count the same events in all processes and are taken from the one with the highest count.
    """
    families = {family.name: family for family in _parsed(this_process.decode())}
    for text in others:
        for family in _parsed(text):
            if family.name in families:
                _add(families[family.name], family, family.name in shared)
            elif family.type != "gauge" or family.name in _OF_FIRST:
                families[family.name] = family
    return _text(families.values())


def _text(families: Iterable[Metric]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Ready(families))
    return generate_latest(registry)


def with_prefixes(text: bytes, prefixes: Sequence[str]) -> bytes:
    """Show the engine's metrics, which begin with `modulm:`, under each of these prefixes."""
    if tuple(prefixes) == ("modulm",):
        return text
    lines = text.decode().splitlines(keepends=True)
    engine = [line for line in lines if line.startswith(_ENGINE)]
    others = [line for line in lines if not line.startswith(_ENGINE)]
    shown = [line.replace("modulm:", f"{prefix}:", 1) for prefix in prefixes for line in engine]
    return "".join(others + shown).encode()


def _parsed(text: str) -> Iterable[Metric]:
    return text_string_to_metric_families(text)


def _add(total: Metric, more: Metric, shared: bool) -> None:
    if total.type == "gauge" and total.name not in _ADDITIVE | _LISTED:
        return
    shared = shared or total.name in _LISTED
    indices = {(s.name, *sorted(s.labels.items())): index for index, s in enumerate(total.samples)}
    for sample in more.samples:
        index = indices.get((sample.name, *sorted(sample.labels.items())))
        if index is None:
            total.samples.append(sample)
        else:
            known = total.samples[index]
            value = max(known.value, sample.value) if shared else known.value + sample.value
            total.samples[index] = known._replace(value=value)


class _Ready(Collector):
    """A collector of finished metric families."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterable[Metric]:
        return self._families
