"""Traces of requests over OpenTelemetry."""
