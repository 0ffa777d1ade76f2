"""Error responses: OpenAI's body and a status, without details of this machine."""

from __future__ import annotations

import logging
import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import msgspec
from attrs import frozen
from starlette.exceptions import HTTPException
from starlette.responses import Response

from modulm.errors import (
    CheckpointError,
    ContextLengthExceeded,
    EngineAsleep,
    EngineDead,
    EngineError,
    EngineStalled,
    ModulmError,
    NotFound,
    QueueFull,
    ReplicaDied,
    RequestError,
    UnsupportedError,
)
from modulm_isolation.terms import IsolationError
from modulm_server.engine.client import EngineRestarting

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.requests import Request
    from starlette.types import Scope

    from modulm_server.openapi import ErrorAnswer

__all__ = [
    "ApiError",
    "ClientGone",
    "describe",
    "error_body",
    "escape",
    "exception_handler",
    "http_error",
    "model_error",
    "report",
    "respond",
    "shutting_down",
]

log = logging.getLogger("modulm_server")

#: Details that must not leave the machine: memory addresses, file paths, tracebacks.
_PRIVATE = re.compile(
    r"0x[0-9a-fA-F]{6,}|Traceback \(most recent.*|(?<![\w:/.])/(?!v\d/)(?:[\w.@+-]+/)+[\w.@+-]+",
    re.DOTALL,
)
_LONGEST = 2000
#: Characters of an error message in a log line.
_SHOWN = 500
#: Characters of a path that is compared with those of the routes.
_LONGEST_PATH = 64
#: The status of a request whose client has disconnected.
_GONE = 499

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ClientGone(Exception):
    """The client has disconnected."""


class ApiError(ModulmError):
    """An error response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        if self.status >= 500:
            return "server_error"
        return _TYPES.get(self.status, "invalid_request_error")


def shutting_down() -> ApiError:
    """Return the refusal of requests that come while the server shuts down."""
    return ApiError(
        503,
        "the server is shutting down",
        code="shutting_down",
        headers={"Retry-After": "10", "Connection": "close"},
    )


@frozen
class _Context:
    status: int
    code: str | None
    retry: float | None = None


_KNOWN: tuple[tuple[type[Exception], _Context], ...] = (
    (EngineAsleep, _Context(503, "engine_asleep", 1.0)),
    (QueueFull, _Context(429, "overloaded", 1.0)),
    (NotFound, _Context(404, "not_found")),
    (ContextLengthExceeded, _Context(400, "context_length_exceeded")),
    (RequestError, _Context(400, None)),
    (CheckpointError, _Context(500, "checkpoint_error")),
    (UnsupportedError, _Context(400, "unsupported")),
    (ReplicaDied, _Context(503, "replica_died", 1.0)),
    (EngineDead, _Context(503, "engine_dead", 10.0)),
    (EngineRestarting, _Context(503, "engine_restarting", 5.0)),
    (EngineStalled, _Context(503, "engine_stalled", 10.0)),
    (IsolationError, _Context(500, "plugin_failed")),
)


#: Messages for clients about an engine that is not available.
_UNAVAILABLE = {
    "replica_died": "the replica that ran this request has died: retry the request",
    "engine_restarting": "the engine is being restarted: retry the request",
    "engine_dead": "the engine has stopped",
    "engine_stalled": "the engine does not respond",
}


def describe(error: BaseException, reference: str = "") -> ApiError:
    """Describe an exception for the client. reference: the request id in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return http_error(error)
    if isinstance(error, ClientGone):
        return ApiError(_GONE, "the client has disconnected")
    for kind, context in _KNOWN:
        if isinstance(error, kind):
            return _describe_known(error, context)
    suffix = f" (request {reference})" if reference else ""
    if isinstance(error, EngineError):
        return ApiError(
            500, f"the engine failed to finish this request{suffix}", code="engine_error"
        )
    return ApiError(500, f"internal error{suffix}", code="internal_error")


def _describe_known(error: Exception, context: _Context) -> ApiError:
    message = _UNAVAILABLE.get(context.code or "") or str(error)
    retry = error.retry_after if isinstance(error, QueueFull) else context.retry
    headers = {} if retry is None else {"Retry-After": str(max(1, round(retry)))}
    param = error.param if isinstance(error, RequestError) else None
    return ApiError(context.status, message, param=param, code=context.code, headers=headers)


def http_error(error: HTTPException) -> ApiError:
    """Convert an error of the framework, such as an invalid form."""
    return ApiError(error.status_code, str(error.detail), headers=error.headers)


def _route_error(error: HTTPException, scope: Scope) -> ApiError:
    """Describe an unknown path or method, with what is served instead."""
    described, path = http_error(error), scope["path"]
    if error.status_code == 405 and "Allow" in described.headers:
        methods = described.headers["Allow"]
        described.message = f"{escape(path)} takes {methods}, not {scope['method']}"
    elif error.status_code == 404 and error.detail == "Not Found":
        described.message = f"there is no {scope['method']} {escape(path)} here{_hint(path, scope)}"
    return described


def _hint(path: str, scope: Scope) -> str:
    """Name the flags that bring the path, or the most similar one that is served; otherwise, say
    where all are listed.
    """
    state = getattr(scope.get("app"), "state", None)
    if flags := getattr(state, "flagged_paths", {}).get(path):
        return f"; the server has it with {flags}"
    routes = scope["app"].routes if "app" in scope else ()
    served = {route.path for route in routes if hasattr(route, "path")} - {path}
    close = get_close_matches(path, served, 1, 0.8) if len(path) <= _LONGEST_PATH else []
    if close:
        return f"; did you mean {close[0]}?"
    return "; GET /docs lists the routes" if "/docs" in served else ""


def model_error(model: str) -> ApiError:
    """The error for a model that is not served."""
    return ApiError(
        404,
        f"model {model[:256]!r} is not served here; GET /v1/models lists the served ones",
        param="model",
        code="model_not_found",
    )


def error_body(error: ApiError) -> ErrorAnswer:
    """OpenAI's error object."""
    message = _PRIVATE.sub("[...]", error.message[: 2 * _LONGEST])[:_LONGEST] or "error"
    return {
        "error": {
            "message": message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def respond(error: ApiError, body: Callable[[ApiError], Any] = error_body) -> Response:
    """Build the response of an error. body: the error object of the API."""
    return Response(
        msgspec.json.encode(body(error)),
        error.status,
        {"Cache-Control": "no-store", **error.headers},
        "application/json",
    )


def report(error: Exception, scope: Scope, stacks: bool = False) -> ApiError:
    """Log an exception, and describe it for the client."""
    reference = scope.get("modulm.id", "")
    if isinstance(error, HTTPException):
        api_error = _route_error(error, scope)
    else:
        api_error = describe(error, reference)
    if api_error.status >= 500 and not isinstance(error, ApiError):
        log.error(
            "request %s to %s failed: %s: %s",
            reference,
            escape(scope["path"]),
            type(error).__name__,
            escape(str(error), _LONGEST),
            exc_info=error if stacks else None,
        )
    elif 400 <= api_error.status < 500 and api_error.status != _GONE:
        log.info(
            "request %s to %s rejected: %d: %s",
            reference,
            escape(scope["path"]),
            api_error.status,
            escape(api_error.message, _SHOWN),
        )
    return api_error


def exception_handler(stacks: bool) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Create the application's exception handler. stacks: log tracebacks too."""

    async def answer(request: Request, error: Exception) -> Response:
        return respond(report(error, request.scope, stacks))

    return answer


def escape(text: str, limit: int = 256) -> str:
    """Escape a client's text for one line of a log."""
    cut = text if len(text) <= limit else text[:limit] + "..."
    return cut.encode("unicode_escape").decode("ascii")
