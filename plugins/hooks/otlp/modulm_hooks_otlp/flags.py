"""The flag of traces."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["TracesConfig"]


def _address(value: object) -> str | None:
    """Validate a URL. Raises ValueError if it is not an endpoint."""
    if value is None:
        return None
    text = str(value)
    if text.partition("://")[0] not in ("http", "https", "grpc", "grpcs"):
        raise ValueError(f"{text!r} must begin with http://, https://, grpc:// or grpcs://")
    return text


@flag_group
class TracesConfig(FlagGroup):
    """Export of request traces."""

    title = "Traces"

    otlp_traces_endpoint: str | None = flag(
        None,
        "OTLP collector for traces of requests: http://HOST:4318/v1/traces, or grpc://HOST:4317 "
        "with opentelemetry-exporter-otlp-proto-grpc. OTEL_* variables apply, too.",
        parse=_address,
    )
