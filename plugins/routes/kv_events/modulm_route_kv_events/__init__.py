"""Where events of the KV cache are published: /kv_event_sources."""

from __future__ import annotations

import socket
from typing import TypedDict

from fastapi import APIRouter
from starlette.responses import Response

from modulm_kv_events import settings_of
from modulm_server.json_body import json_response
from modulm_server.openapi import response_docs
from modulm_server.route import RouteFamily

__all__ = ["KVEvents"]


class Source(TypedDict):
    """Where a replica publishes its events, and where it repeats them."""

    data_parallel_rank: int
    endpoint: str
    replay_endpoint: str | None
    topic: str


class KVEvents(RouteFamily):
    """The route with which routers find the publishers of events."""

    name = "kv_events"
    api = 2
    token_paths = ("*",)

    def router(self) -> APIRouter:
        router = APIRouter(tags=["Operations"])
        router.add_api_route(
            "/kv_event_sources",
            self.sources,
            methods=["GET"],
            responses=response_docs(list[Source]),
        )
        return router

    async def sources(self) -> Response:
        """Where events of the KV cache are published (`--kv-events-config`), by replica of this
        machine; an empty list without events. Wildcards are this machine's host name.
        """
        settings, parallel = settings_of(self.context.config), self.context.config.parallel
        ranks = parallel.data_parallel_size_local or parallel.data_parallel_size
        sources: list[Source] = []
        for rank in range(ranks if settings.active else 0):
            endpoint, replay = settings.of_replica(rank)
            sources.append({
                "data_parallel_rank": rank,
                "endpoint": _reachable(endpoint),
                "replay_endpoint": None if replay is None else _reachable(replay),
                "topic": settings.topic,
            })  # fmt: skip
        return json_response(sources)


def _reachable(endpoint: str) -> str:
    """Return the endpoint with this machine's host name instead of a wildcard."""
    for wildcard in ("//*:", "//0.0.0.0:", "//[::]:"):
        endpoint = endpoint.replace(wildcard, f"//{socket.gethostname()}:")
    return endpoint
