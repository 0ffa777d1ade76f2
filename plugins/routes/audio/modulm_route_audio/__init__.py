"""OpenAI's audio routes. No model here hears or speaks yet: each route says so."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from modulm_server.errors import ApiError
from modulm_server.route import RouteFamily

__all__ = ["Audio"]


class Audio(RouteFamily):
    """`/v1/audio/transcriptions`, `/v1/audio/translations`, `/v1/audio/speech`."""

    name = "audio"
    api = 2

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1/audio", tags=["Audio"])
        for path in ("/transcriptions", "/translations", "/speech"):
            router.add_api_route(path, self.not_yet, methods=["POST"], include_in_schema=False)
        return router

    async def not_yet(self) -> Response:
        """Audio is not there yet."""
        raise ApiError(400, "audio: not yet supported by modulm", code="unsupported")
