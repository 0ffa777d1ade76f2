"""Hooks that enable traces; OpenTelemetry is imported only if the flag is set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from modulm.plugins import hookimpl
from modulm_hooks_otlp.flags import TracesConfig

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.request_listener import RequestListener

__all__ = ["modulm_app_created", "modulm_report_header", "modulm_request_listeners"]


def _endpoint(config: EngineConfig) -> str | None:
    return config.group(TracesConfig).otlp_traces_endpoint


@hookimpl
def modulm_request_listeners(config: EngineConfig) -> Sequence[RequestListener]:
    """Return the listener that creates the spans of a request when it has ended."""
    endpoint = _endpoint(config)
    if endpoint is None:
        return ()
    from modulm_hooks_otlp.spans import Spans, provider_of

    served = config.model.served_model_name or (config.model.model,)
    return (Spans(provider_of(endpoint), served[0]),)


@hookimpl
def modulm_app_created(app: Any, config: EngineConfig) -> None:
    """Add the middleware that reads trace context headers."""
    if _endpoint(config) is not None:
        from modulm_hooks_otlp.context import IncomingContext

        app.add_middleware(IncomingContext)


@hookimpl
def modulm_report_header(config: EngineConfig | None) -> Sequence[str]:
    """Return the banner's line on traces."""
    endpoint = None if config is None else _endpoint(config)
    return () if endpoint is None else (f"traces: {endpoint}",)
