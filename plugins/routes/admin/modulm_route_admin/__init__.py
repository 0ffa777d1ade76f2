"""Development routes: prefix cache, sleep mode and profiles."""

from __future__ import annotations

from typing import TypedDict

from fastapi import APIRouter
from starlette.responses import Response

from modulm_frontend.flags import ProfilerConfig
from modulm_server.flags import ServerConfig
from modulm_server.json_body import json_response
from modulm_server.openapi import response_docs
from modulm_server.route import RouteFamily

__all__ = ["Admin"]


class Success(TypedDict):
    """Whether the operation succeeded."""

    success: bool


class Sleeping(TypedDict):
    """Whether the engine sleeps."""

    is_sleeping: bool


class Admin(RouteFamily):
    """With --server-dev-mode: `/reset_prefix_cache`, `/sleep`, `/wake_up`, `/is_sleeping`. With it
    or with --profiler-config: `/start_profile`, `/stop_profile`.
    """

    name = "admin"
    api = 2

    def absent(self) -> str | None:
        if self._developing or self.context.config.group(ProfilerConfig).profiler is not None:
            return None
        return "neither --server-dev-mode nor --profiler-config is set"

    @property
    def _developing(self) -> bool:
        return self.context.config.group(ServerConfig).server_dev_mode

    def router(self) -> APIRouter:
        router = APIRouter(tags=["Administration"])
        for path, silent in (
            ("/start_profile", self.start_profile),
            ("/stop_profile", self.stop_profile),
        ):
            router.add_api_route(path, silent, methods=["POST"], response_class=Response)
        if not self._developing:
            return router
        router.add_api_route(
            "/reset_prefix_cache",
            self.reset_prefix_cache,
            methods=["POST"],
            responses=response_docs(Success),
        )
        router.add_api_route(
            "/is_sleeping", self.is_sleeping, methods=["GET"], responses=response_docs(Sleeping)
        )
        for path, silent in (("/sleep", self.sleep), ("/wake_up", self.wake_up)):
            router.add_api_route(path, silent, methods=["POST"], response_class=Response)
        return router

    async def start_profile(self) -> Response:
        """Start profiling the engine's steps."""
        await self.context.engine.start_profile()
        return Response(status_code=200)

    async def stop_profile(self) -> Response:
        """Stop profiling and write the trace to the folder of --profiler-config."""
        await self.context.engine.stop_profile()
        return Response(status_code=200)

    async def reset_prefix_cache(self) -> Response:
        """Clear the prefix cache."""
        answer: Success = {"success": await self.context.engine.reset_prefix_cache()}
        return json_response(answer)

    async def sleep(self, level: int = 1) -> Response:
        """Free the memory of the KV cache, and at level 2 that of the weights too."""
        await self.context.engine.sleep(level)
        return Response(status_code=200)

    async def wake_up(self) -> Response:
        """Allocate the memory again."""
        await self.context.engine.wake_up()
        return Response(status_code=200)

    async def is_sleeping(self) -> Response:
        """Whether the engine sleeps."""
        answer: Sleeping = {"is_sleeping": await self.context.engine.is_sleeping()}
        return json_response(answer)
