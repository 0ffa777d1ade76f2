"""Route family: HTTP routes that belong together (group `modulm.routes`).

A family is a FastAPI router made for one server. The server puts authentication, limits, request
ids and error bodies around it: a route asks for a key unless it is on the server's own list, an
exception of the tree in `modulm.errors` becomes the right status, anything else a plain 500.
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
    """What a family is built with.

    config: resolved. models: names that the model is served under, the first one is shown in
    answers. created: Unix time in seconds at which the server was built. generation: turns
    messages and prompts into running generations. registry: behind /metrics. loopback: lets a
    family call the server's other routes.
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
        """A reason why the family is not served with this configuration, or None."""
        return None

    @abstractmethod
    def router(self) -> APIRouter:
        """The routes. Called once; an endpoint reads its body with `modulm_server.json_body`."""

    async def start(self) -> None:
        """The server takes requests: begin background work."""

    async def stop(self) -> None:
        """The server is going down: end background work."""
