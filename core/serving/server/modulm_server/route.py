"""Route families: HTTP routes that belong together (entry-point group `modulm.routes`).

A family builds a FastAPI router for one server. The server adds authentication, limits, request
ids and error bodies: a route needs a key unless the server lists it as open, exceptions of
`modulm.errors` become the right status, and any other exception a plain 500.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

if TYPE_CHECKING:
    from fastapi import APIRouter
    from prometheus_client import CollectorRegistry

    from modulm.contracts.config import EngineConfig
    from modulm_server.engine.client import EngineClient
    from modulm_server.generation import GenerationService
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
    """

    engine: EngineClient
    config: EngineConfig
    models: tuple[str, ...]
    created: int
    generation: GenerationService
    registry: CollectorRegistry
    loopback: LoopbackClient


class RouteFamily(ABC):
    """Routes of one API."""

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]

    def __init__(self, context: RouteContext) -> None:
        self.context = context

    def absent(self) -> str | None:
        """Why the family is not served with this configuration, or None."""
        return None

    @abstractmethod
    def router(self) -> APIRouter:
        """Build the routes. Called once. Endpoints read bodies with `modulm_server.json_body`."""

    async def start(self) -> None:
        """Start background work; called when the server takes requests."""

    async def stop(self) -> None:
        """Stop background work; called when the server shuts down."""
