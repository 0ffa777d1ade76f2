"""Route family: HTTP routes that belong together (group `modulm.routes`).

A family is a FastAPI router made for one server. The server puts authentication, limits, request
ids and error bodies around it: a route asks for a key unless it is on the server's own list, an
exception of the tree in `modulm.errors` becomes the right status, anything else a plain 500.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

if TYPE_CHECKING:
    from fastapi import APIRouter

__all__ = ["API", "RouteContext", "RouteFamily"]

API = 1


@frozen(eq=False, kw_only=True)
class RouteContext:
    """What a family is built with.

    engine: modulm.engine.async_llm.AsyncLLM. config: the resolved EngineConfig. models: names that
    the model is served under, the first one is shown in answers. created: Unix time in seconds at
    which the server was built. desk: the GenerationService, which turns messages and prompts into
    running generations. registry: the prometheus_client registry behind /metrics. inside: the
    LoopbackClient, which lets a family call the server's other routes.
    """

    engine: Any
    config: Any
    models: tuple[str, ...]
    created: int
    desk: Any
    registry: Any
    inside: Any


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

    async def stop(self) -> None:
        """The server is going down: end background work."""
