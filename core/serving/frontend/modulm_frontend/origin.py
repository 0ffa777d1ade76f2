"""Where a request comes from, for those who are told of its end (`modulm_request_listeners`)."""

from __future__ import annotations

from contextvars import ContextVar

__all__ = ["request_origin"]

#: What a front end says of the requests that are made in its context; None where it says nothing.
request_origin: ContextVar[object | None] = ContextVar("modulm_request_origin", default=None)
