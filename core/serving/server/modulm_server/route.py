"""Route families: HTTP routes that belong together (entry-point group `modulm.routes`).

A family builds a FastAPI router for one server. The server adds authentication, limits, request
ids and error bodies: a route needs a key unless the server lists it as open, exceptions of
`modulm.errors` become the right status, and any other exception a plain 500.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import field, frozen

from modulm_server.errors import ApiError, ClientGone, error_body, report, respond
from modulm_server.flags import ServerConfig
from modulm_server.key_limits import rate_headers
from modulm_server.sse import DONE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping

    from fastapi import APIRouter, Request
    from prometheus_client import CollectorRegistry
    from starlette.responses import Response

    from modulm.contracts.config import EngineConfig
    from modulm_server.directory import ModelDirectory
    from modulm_server.engine.client import EngineClient
    from modulm_server.errors import ApiError
    from modulm_server.generation import GenerationService
    from modulm_server.key_limits import Rate
    from modulm_server.loopback import LoopbackClient

__all__ = ["API", "RouteContext", "RouteFamily"]

API = 2


@frozen(eq=False, kw_only=True)
class RouteContext:
    """The objects that a family is built with.

    config: resolved. models: the served names of the model; responses show the first. created:
    Unix time in seconds at which the server was built. generation: turns messages and prompts into
    running generations. registry: the metrics behind /metrics. loopback: calls the server's other
    routes.

    On a server of several models, each family is built once for the front end and once for each
    loaded model. directory: all models, for the front end's families; None for those of a model,
    and on a server of one. front: False for the families of a model. stores: what the families of
    one name share, by key, such as the responses that a later request continues.
    """

    engine: EngineClient
    config: EngineConfig
    models: tuple[str, ...]
    created: int
    generation: GenerationService
    registry: CollectorRegistry
    loopback: LoopbackClient
    directory: ModelDirectory | None = None
    front: bool = True
    stores: MutableMapping[str, Any] = field(factory=dict)


class RouteFamily(ABC):
    """Routes of one API.

    On a server of several models a request goes to the family of the model that it names, except on
    these paths. shared_paths: the front end's family answers; "*" is all paths. cold_paths: it
    answers while the model is not loaded, instead of loading it. token_paths: a server with
    --tokens-only has them; "*" is all paths.

    upload_paths: beginnings of paths whose endpoints read bodies in parts and keep none in memory,
    so that the server's limits of bodies do not hold.

    flagged_paths: path -> the flags without which a server does not have it, for the message of a
    404.
    """

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    shared_paths: ClassVar[tuple[str, ...]] = ()
    cold_paths: ClassVar[tuple[str, ...]] = ()
    token_paths: ClassVar[tuple[str, ...]] = ()
    upload_paths: tuple[str, ...] = ()
    flagged_paths: ClassVar[Mapping[str, str]] = {}

    def __init__(self, context: RouteContext) -> None:
        self.context = context

    def absent(self) -> str | None:
        """Why the family is not served with this configuration, or None."""
        return None

    @abstractmethod
    def router(self) -> APIRouter:
        """Build the routes. Called once. Endpoints read bodies with `modulm_server.json_body`."""

    def failure(self, error: ApiError) -> Any:
        """The body of an error that is raised before the endpoint, as JSON; by default OpenAI's."""
        return error_body(error)

    def rate_headers(self, rates: Iterable[Rate]) -> Iterable[tuple[bytes, bytes]]:
        """Headers that tell the rates of a request's key; by default OpenAI's."""
        return rate_headers(rates)

    async def start(self) -> None:
        """Start background work; called when the server takes requests."""

    async def stop(self) -> None:
        """Stop background work; called when the server shuts down."""

    def error_response(self, error: ApiError) -> Response:
        """The response to an error that happens before a request reaches its model."""
        return respond(error)

    def with_errors(
        self, endpoint: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wrap an endpoint, so that its errors become `error_response`."""

        @wraps(endpoint)
        async def answered(request: Request) -> Response:
            try:
                return await endpoint(request)
            except ClientGone:
                raise
            except Exception as error:
                stacks = self.context.config.group(ServerConfig).log_error_stack
                return self.error_response(report(error, request.scope, stacks))

        return answered

    def error_frames(self, body: bytes) -> bytes | None:
        """The end of an event stream that fails. body: of the error's response.

        None if the API's streams are not event streams, so that they cannot have comments either.
        """
        return b"data: " + body + b"\n\n" + DONE
