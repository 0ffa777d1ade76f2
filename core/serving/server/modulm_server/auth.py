"""API keys: every route needs one, except the open paths.

The guard wraps the endpoint of each route, behind the router, so that no spelling of a path, host
or prefix can bypass it (CVE-2026-48746 shows the risk of checking URLs).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.routing import BaseRoute, Host, Match, Mount, Route, WebSocketRoute

from modulm.errors import ConfigError
from modulm_server.api_keys import ApiKey, Keys
from modulm_server.errors import ApiError, error_body, respond
from modulm_server.flags import ServerConfig
from modulm_server.key_limits import Caller, Usages, rate_headers, set_caller

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from modulm_server.engine.adapters import Adapter
    from modulm_server.engine.client import EngineClient
    from modulm_server.key_limits import Rate

__all__ = [
    "LOOPBACK",
    "OPEN_PATHS",
    "check_open_paths",
    "current_owner",
    "find_key",
    "guard",
    "may_use",
    "open_paths",
    "owner_of",
    "usable_adapters",
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


def current_owner() -> str:
    """The owner of the current task's request, as in `owner_of`, for code without the request."""
    return _owner.get()


def owner_of(request: Request) -> str:
    """The owner of a request: a digest of its key, or of the name that the key has in
    `--api-keys-file`; empty on a server without keys.
    """
    owner: str = request.scope.get("modulm.owner", "")
    return owner


def may_use(adapter: Adapter) -> bool:
    """Whether the key of the current task's request may use an adapter."""
    return adapter.owner in (None, current_owner())


def usable_adapters(engine: EngineClient) -> dict[str, Adapter]:
    """The adapters that the key of the current task's request may use, by name."""
    return {name: one for name, one in engine.adapters.items() if may_use(one)}


def check_open_paths(config: ServerConfig, routes: Iterable[BaseRoute]) -> None:
    """Raise ConfigError for a path of `--open-paths` that no route serves."""
    served = {route.path for route in routes if isinstance(route, Route)}
    for path in open_paths(config) - OPEN_PATHS - {*ServerConfig().open_paths}:
        if path not in served:
            raise ConfigError("open_paths", f"nothing is served at {path!r}")


class _Api(Protocol):
    """How an API refuses requests and tells rates: a route family."""

    def failure(self, error: ApiError) -> Any:
        """The body of an error, as JSON."""

    def rate_headers(self, rates: Iterable[Rate]) -> Iterable[tuple[bytes, bytes]]:
        """Headers that tell the rates of a request's key."""


class _Guard:
    """An endpoint that needs a key, within the key's limits. family: its API's; by default, errors
    and headers are OpenAI's.
    """

    def __init__(
        self, app: ASGIApp, keys: Keys, usages: Usages, family: _Api | None = None
    ) -> None:
        self._app = app
        self._keys = keys
        self._usages = usages
        self._failure = error_body if family is None else family.failure
        self._rate_headers = rate_headers if family is None else family.rate_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        internal = scope.get("modulm.loopback") is LOOPBACK
        if internal:
            entry = self._keys.of_owner(scope["modulm.owner"])
        else:
            found = find_key(self._keys, scope["headers"])
            if isinstance(found, ApiError):
                await self._refuse(found, scope, receive, send)
                return
            entry = found
            scope["modulm.owner"] = entry.owner
        _owner.set(scope["modulm.owner"])
        if entry is None:  # a batch whose key has been removed
            await self._app(scope, receive, send)
            return
        await self._run(Caller(entry, self._usages.of(entry), self._usages, internal),
                        scope, receive, send)  # fmt: skip

    async def _run(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                rates = self._rate_headers(caller.rates())
                message["headers"] = [*message.get("headers", ()), *rates]
            await send(message)

        try:
            caller.enter(scope.get("method", ""))
        except ApiError as error:
            await self._refuse(error, scope, receive, send_with_limits)
            return
        set_caller(caller)
        try:
            await self._app(scope, receive, send_with_limits)
        finally:
            caller.leave()

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1013 if error.status == 429 else 1008})
        else:
            await respond(error, self._failure)(scope, receive, send)


def find_key(keys: Keys, headers: Iterable[tuple[bytes, bytes]]) -> ApiKey | ApiError:
    """The entry of the key that a request's headers have, or why they have none."""
    sent = _sent_keys(headers)
    if len(sent) > 1:
        return _AMBIGUOUS
    if not sent or not sent[0]:
        return _MISSING
    return keys.find(sent[0]) or _WRONG


def _sent_keys(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """The keys of a request, from bearer tokens and Anthropic's x-api-key header.

    One header of each kind with the same value counts as one key.
    """
    tokens, plain = [], []
    for name, value in headers:
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

    def __init__(self, route: BaseRoute, keys: Keys, usages: Usages) -> None:
        self.route = route
        self._guard = _Guard(route.handle, keys, usages)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return self.route.matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guard(scope, receive, send)


def open_paths(config: ServerConfig) -> frozenset[str]:
    """The paths that need no key: the built-in ones and those of `--open-paths`."""
    return OPEN_PATHS | {path for path in config.open_paths if path != "none"}


def guard(
    routes: list[BaseRoute],
    keys: Keys,
    unlocked: frozenset[str] = OPEN_PATHS,
    families: Mapping[int, _Api] = MappingProxyType({}),
    processes: int = 1,
) -> None:
    """Make every route need a key, except those with an `unlocked` path. Changes `routes`.

    families: `id` of a route -> its family. processes: that divide the limits of keys.
    """
    if not keys:
        return
    usages = Usages(processes)
    for index, route in enumerate(routes):
        if isinstance(route, Route) and route.path in unlocked:
            continue
        if type(route) in _PLAIN:
            family = families.get(id(route))
            route.app = _Guard(route.app, keys, usages, family)  # type: ignore[attr-defined]
        else:
            routes[index] = _Locked(route, keys, usages)
