"""What the server measures of its own: requests by route, with label sets that cannot grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)

if TYPE_CHECKING:
    from starlette.types import Scope

__all__ = ["HttpMetrics", "exposition"]

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class HttpMetrics:
    """Counts of requests, by the route that served them: never by a path that a client made up."""

    def __init__(self, registry: CollectorRegistry) -> None:
        ProcessCollector(registry=registry)
        self._requests = Counter(
            "http_requests",
            "Requests by route, method and class of status.",
            ("handler", "method", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Time to the last byte of an answer.",
            ("handler", "method"),
            buckets=_SECONDS,
            registry=registry,
        )

    def observe(self, scope: Scope, status: int, seconds: float) -> None:
        """A request is over."""
        route = scope.get("route")
        handler = route.path if route is not None and hasattr(route, "path") else "none"
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        self._seconds.labels(handler, method).observe(seconds)


def exposition(registry: CollectorRegistry) -> tuple[bytes, str]:
    """The metrics in Prometheus' text format, and its content type."""
    return generate_latest(registry), CONTENT_TYPE_LATEST
