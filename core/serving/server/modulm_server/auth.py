"""API keys: every route asks for one, except those on a list in this module.

The guard sits on the endpoint of each route, behind the router: no way of writing a path, a host
or a prefix can reach an endpoint without it (CVE-2026-48746 is what a check on the URL costs).
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

#: Routes that always answer without a key: signs of life, and the page that asks the user for one,
#: with the files that it loads.
OPEN_PATHS = frozenset({"/", "/page/{file:path}", "/health", "/ready"})

#: Kinds of routes whose endpoint can be wrapped, which leaves them visible to the API pages.
_PLAIN = (APIRoute, APIWebSocketRoute, Host, Mount, Route, WebSocketRoute)

#: What the scope of a request carries that the server makes itself. No client can send it.
LOOPBACK = object()

_MISSING = ApiError(
    401,
    "a key is needed: send Authorization: Bearer KEY",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)
_AMBIGUOUS = ApiError(
    400,
    "several keys were sent: send one, as Authorization: Bearer KEY or as x-api-key",
    code="ambiguous_credentials",
)
_WRONG = ApiError(
    401,
    "this key is not known here",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)


_owner: ContextVar[str] = ContextVar("modulm_owner", default="")


class Keys:
    """A set of keys, kept as digests. Without keys everybody is let in."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def __len__(self) -> int:
        return len(set(self._digests))

    def knows(self, key: bytes) -> bool:
        """Whether the key is one of ours, in a time that does not depend on which or how close."""
        given = _digest(key)
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def current_owner() -> str:
    """Whose request this task answers, as `owner_of` has it: for what has no request at hand and
    must not depend on routes to remember it.
    """
    return _owner.get()


def owner_of(request: Request) -> str:
    """Whose request this is: a digest of the key, empty on a server without keys."""
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
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise ConfigError("api_key_file", f"{config.api_key_file} holds no key")
        keys += found
    if any(not key.strip() for key in keys):
        raise ConfigError("api_key", "a key is empty")
    return Keys(keys)


def check_open_paths(config: ServerConfig, routes: Iterable[BaseRoute]) -> None:
    """Raise ConfigError for an open path, other than the default ones, that no route has."""
    served = {route.path for route in routes if isinstance(route, Route)}
    for path in open_paths(config) - OPEN_PATHS - {*ServerConfig().open_paths}:
        if path not in served:
            raise ConfigError("open_paths", f"nothing is served at {path!r}")


class _Guard:
    """An endpoint behind a lock."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = _given_keys(scope)
        key = given[0] if given else None
        if len(given) > 1 and scope["type"] != "websocket":
            await respond(_AMBIGUOUS)(scope, receive, send)
        elif len(given) == 1 and key is not None and self._keys.knows(key):
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


def _given_keys(scope: Scope) -> list[bytes]:
    """What was sent as a key: bearer tokens and the header that Anthropic's clients send.

    One header of each kind that say the same are one key; anything else is several.
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
    """A route of a kind we do not know, behind a lock as a whole."""

    def __init__(self, route: BaseRoute, keys: Keys) -> None:
        self.route = route
        self._guard = _Guard(route.handle, keys)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return self.route.matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guard(scope, receive, send)


def open_paths(config: ServerConfig) -> frozenset[str]:
    """The paths that answer without a key: those that always do, and those of `--open-paths`."""
    return OPEN_PATHS | {path for path in config.open_paths if path != "none"}


def guard(routes: list[BaseRoute], keys: Keys, unlocked: frozenset[str] = OPEN_PATHS) -> None:
    """Put the lock on every route but those whose path is `unlocked`, in place."""
    if not keys:
        return
    for place, route in enumerate(routes):
        if isinstance(route, Route) and route.path in unlocked:
            continue
        if type(route) in _PLAIN:
            route.app = _Guard(route.app, keys)  # type: ignore[attr-defined]
        else:
            routes[place] = _Locked(route, keys)
