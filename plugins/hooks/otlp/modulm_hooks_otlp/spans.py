"""Spans of a finished request: one for all of it, with child spans for its phases.

Attribute names follow OpenTelemetry's conventions for generative AI, otherwise vLLM.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import modulm
from modulm.config.environ import variables
from modulm.contracts.request_listener import RequestListener
from modulm.contracts.sampling import PoolingParams, SamplingParams
from modulm.errors import ConfigError
from modulm.plugins.index import to_install
from modulm_hooks_otlp.context import Incoming

if TYPE_CHECKING:
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

    from modulm.contracts.outputs import Finished

__all__ = ["Spans", "exporter_of", "provider_of"]

#: Suffixes of the paths of chat requests.
_CHATS = ("/chat/completions", "/messages", "/responses", "/api/chat")


def exporter_of(endpoint: str) -> SpanExporter:
    """Create the exporter. Raises ConfigError if gRPC is requested but not installed."""
    protocol = variables().get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "")
    if endpoint.startswith("grpc") or protocol == "grpc":
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
                OTLPSpanExporter as GrpcExporter,
            )
        except ImportError as error:
            raise ConfigError(
                "otlp_traces_endpoint",
                "gRPC is not installed"
                + to_install("opentelemetry-exporter-otlp-proto-grpc")
                + "; or give the collector's HTTP address, http://HOST:4318/v1/traces",
            ) from error
        address = urlsplit(endpoint).netloc
        exporter: SpanExporter = GrpcExporter(address, insecure=not endpoint.startswith("grpcs"))
        return exporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    path = "" if urlsplit(endpoint).path.strip("/") else "/v1/traces"
    return OTLPSpanExporter(endpoint.rstrip("/") + path)


def provider_of(endpoint: str) -> TracerProvider:
    """Create a tracer provider that exports spans in batches, the last ones at exit."""
    attributes = {} if variables().get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "modulm"}
    provider = TracerProvider(resource=Resource.create(attributes))
    provider.add_span_processor(BatchSpanProcessor(exporter_of(endpoint)))
    return provider


class Spans(RequestListener):
    """Creates the spans of each finished request."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self.provider = provider
        self._tracer = provider.get_tracer("modulm", modulm.__version__)
        self._model = model
        self._context = TraceContextTextMapPropagator()

    def ended(self, request: Finished) -> None:
        times, origin = request.times, request.origin
        carrier = origin.carrier if isinstance(origin, Incoming) else {}
        clock = _Clock()
        span = self._tracer.start_span(
            "llm_request",
            context=self._context.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=clock.at(times.arrival_time),
        )
        if span.is_recording():
            span.set_attributes(self._attributes(request))
            if "error" in request.reasons:
                span.set_status(Status(StatusCode.ERROR))
            self._parts(request, span, clock)
        span.end(clock.at(times.finished_time or time.monotonic()))

    def _parts(self, request: Finished, span: Span, clock: _Clock) -> None:
        """Add child spans for the phases of a request."""
        times = request.times
        ended = times.last_token_time or times.finished_time
        parts = (
            ("queue", times.arrival_time, times.first_scheduled_time),
            ("prefill", times.first_scheduled_time, times.first_token_time or ended),
            ("decode", times.first_token_time, times.last_token_time),
        )
        within = set_span_in_context(span)
        for name, begin, end in parts:
            if begin is not None and end is not None:
                part = self._tracer.start_span(name, within, start_time=clock.at(begin))
                part.end(clock.at(end))

    def _attributes(self, request: Finished) -> dict[str, AttributeValue]:
        origin, generated = request.origin, sum(request.generated)
        path = origin.path if isinstance(origin, Incoming) else ""
        pooled = isinstance(request.params, PoolingParams)
        chat = path.endswith(_CHATS)
        operation = "embeddings" if pooled else "chat" if chat else "text_completion"
        attributes: dict[str, AttributeValue | None] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "modulm",
            "gen_ai.request.model": request.adapter or self._model,
            "gen_ai.response.model": request.adapter or self._model,
            "gen_ai.request.id": request.id,
            "gen_ai.response.id": request.id,
            "gen_ai.response.finish_reasons": list(request.reasons),
            "gen_ai.usage.input_tokens": request.prompt,
            "gen_ai.usage.output_tokens": generated,
            "gen_ai.usage.prompt_tokens": request.prompt,
            "gen_ai.usage.completion_tokens": generated,
            "gen_ai.usage.num_sequences": len(request.generated) or 1,
            "http.route": path or None,
            **_latencies(request),
        }
        if isinstance(request.params, SamplingParams):
            attributes |= _settings(request.params)
        return {name: value for name, value in attributes.items() if value is not None}


def _settings(params: SamplingParams) -> dict[str, AttributeValue | None]:
    """Attributes for the sampling parameters."""
    return {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.n": params.n,
        "gen_ai.request.choice.count": params.n if params.n != 1 else None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.stop_sequences": list(params.stop) or None,
    }


def _latencies(request: Finished) -> dict[str, AttributeValue | None]:
    """Attributes for latencies in seconds, by vLLM's names."""
    times = request.times
    arrival, scheduled, first = (
        times.arrival_time,
        times.first_scheduled_time,
        times.first_token_time,
    )

    def between(begin: float | None, end: float | None) -> float | None:
        return None if begin is None or end is None else max(end - begin, 0.0)

    last = times.last_token_time
    return {
        "gen_ai.latency.time_in_queue": between(arrival, scheduled),
        "gen_ai.latency.time_to_first_token": between(arrival, first),
        "gen_ai.latency.time_in_model_prefill": between(scheduled, first),
        "gen_ai.latency.time_in_model_decode": between(first, last),
        "gen_ai.latency.time_in_model_inference": between(scheduled, last),
        "gen_ai.latency.e2e": between(arrival, times.finished_time),
    }


class _Clock:
    """Converts seconds of the monotonic clock to nanoseconds since 1970."""

    def __init__(self) -> None:
        self._zero = time.time_ns() - time.monotonic_ns()

    def at(self, seconds: float) -> int:
        return self._zero + round(seconds * 1e9)
