"""API keys: every route needs one, except the open paths.

The guard wraps the endpoint of each route, behind the router, so that no spelling of a path, host
or prefix can bypass it (CVE-2026-48746 shows the risk of checking URLs).
"""

from __future__ import annotations

import hashlib
import hmac
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.routing import BaseRoute, Host, Match, Mount, Route, WebSocketRoute

from modulm.errors import ConfigError
from modulm_server.errors import ApiError, respond
from modulm_server.flags import ServerConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send


__all__ = [
    "LOOPBACK",
    "OPEN_PATHS",
    "Keys",
    "check_open_paths",
    "current_owner",
    "guard",
    "open_paths",
    "owner_of",
    "read_keys",
]

#: Routes that never need a key: health checks, and the page that asks the user for a key, with its
#: files.
OPEN_PATHS = frozenset({"/", "/page/{file:path}", "/health", "/ready"})

#: Kinds of routes whose endpoint can be wrapped, which leaves them visible to the API pages.
_PLAIN = (APIRoute, APIWebSocketRoute, Host, Mount, Route, WebSocketRoute)

#: Marks the scope of requests that the server makes to itself. Clients cannot send it.
LOOPBACK = object()

_MISSING = ApiError(
    401,
    "an API key is required: send Authorization: Bearer KEY",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)
_AMBIGUOUS = ApiError(
    400,
    "several API keys were sent: send one, as Authorization: Bearer KEY or as x-api-key",
    code="ambiguous_credentials",
)
_WRONG = ApiError(
    401,
    "invalid API key",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)


_owner: ContextVar[str] = ContextVar("modulm_owner", default="")


class Keys:
    """A set of API keys, stored as digests. Without keys, all requests are allowed."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def __len__(self) -> int:
        return len(set(self._digests))

    def knows(self, key: bytes) -> bool:
        """Whether the key is valid, compared in constant time."""
        sent = _digest(key)
        matches = [hmac.compare_digest(sent, digest) for digest in self._digests]
        return any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def current_owner() -> str:
    """The owner of the current task's request, as in `owner_of`, for code without the request."""
    return _owner.get()


def owner_of(request: Request) -> str:
    """The owner of a request: a digest of its key, empty on a server without keys."""
    owner: str = request.scope.get("modulm.owner", "")
    return owner


def read_keys(config: ServerConfig) -> Keys:
    """The keys of the configuration. Raises ConfigError for a key file without a key."""
    keys = list(config.api_key or ())
    if config.api_key_file is not None:
        try:
            lines = Path(config.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                "api_key_file", f"{config.api_key_file} cannot be read: {error}"
            ) from error
        file_keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not file_keys:
            raise ConfigError("api_key_file", f"{config.api_key_file} contains no key")
        keys += file_keys
    if any(not key.strip() for key in keys):
        raise ConfigError("api_key", "a key is empty")
    return Keys(keys)


def check_open_paths(config: ServerConfig, routes: Iterable[BaseRoute]) -> None:
    """Raise ConfigError for a path of `--open-paths` that no route serves."""
    served = {route.path for route in routes if isinstance(route, Route)}
    for path in open_paths(config) - OPEN_PATHS - {*ServerConfig().open_paths}:
        if path not in served:
            raise ConfigError("open_paths", f"nothing is served at {path!r}")


class _Guard:
    """An endpoint that needs a key."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        keys = _sent_keys(scope)
        key = keys[0] if keys else None
        if len(keys) > 1 and scope["type"] != "websocket":
            await respond(_AMBIGUOUS)(scope, receive, send)
        elif len(keys) == 1 and key is not None and self._keys.knows(key):
            _owner.set(_digest(key).hex())
            scope["modulm.owner"] = _owner.get()
            await self._app(scope, receive, send)
        elif scope.get("modulm.loopback") is LOOPBACK:
            _owner.set(scope["modulm.owner"])
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await respond(_WRONG if key else _MISSING)(scope, receive, send)


def _sent_keys(scope: Scope) -> list[bytes]:
    """The keys of a request, from bearer tokens and Anthropic's x-api-key header.

    One header of each kind with the same value counts as one key.
    """
    tokens, plain = [], []
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = bytes(value).partition(b" ")
            tokens.append(token.strip() if scheme.lower() == b"bearer" else b"")
        elif name == b"x-api-key" and value.strip():
            plain.append(bytes(value).strip())
    if tokens and plain and tokens != plain:
        return tokens + plain
    return tokens or plain


class _Locked(BaseRoute):
    """A route of an unknown kind, which needs a key as a whole."""

    def __init__(self, route: BaseRoute, keys: Keys) -> None:
        self.route = route
        self._guard = _Guard(route.handle, keys)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return self.route.matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guard(scope, receive, send)


def open_paths(config: ServerConfig) -> frozenset[str]:
    """The paths that need no key: the built-in ones and those of `--open-paths`."""
    return OPEN_PATHS | {path for path in config.open_paths if path != "none"}


def guard(routes: list[BaseRoute], keys: Keys, unlocked: frozenset[str] = OPEN_PATHS) -> None:
    """Make every route need a key, except those with an `unlocked` path. Changes `routes`."""
    if not keys:
        return
    for index, route in enumerate(routes):
        if isinstance(route, Route) and route.path in unlocked:
            continue
        if type(route) in _PLAIN:
            route.app = _Guard(route.app, keys)  # type: ignore[attr-defined]
        else:
            routes[index] = _Locked(route, keys)
