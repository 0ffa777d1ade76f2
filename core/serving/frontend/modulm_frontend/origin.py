"""The origin of a request, for listeners of its end (`modulm_request_listeners`)."""

from __future__ import annotations

from contextvars import ContextVar

__all__ = ["request_origin"]

#: Set by a front end for the requests created in its context; None by default.
request_origin: ContextVar[object | None] = ContextVar("modulm_request_origin", default=None)
