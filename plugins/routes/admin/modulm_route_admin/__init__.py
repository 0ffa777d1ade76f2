"""Routes behind a switch: caches, sleep and profiles for developers."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from fastapi import APIRouter
from starlette.responses import Response

from modulm_server.errors import ApiError
from modulm_server.flags import ServerConfig
from modulm_server.json_body import json_response
from modulm_server.openapi import gives
from modulm_server.route import RouteFamily

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["Admin"]


class Success(TypedDict):
    """Whether it was done."""

    success: bool


class Sleeping(TypedDict):
    """Whether the engine sleeps."""

    is_sleeping: bool


class Admin(RouteFamily):
    """With --server-dev-mode: `/reset_prefix_cache`, `/sleep`, `/wake_up`, `/is_sleeping`,
    `/start_profile`, `/stop_profile`.
    """

    name = "admin"
    api = 2

    def absent(self) -> str | None:
        config = self.context.config
        if config.group(ServerConfig).server_dev_mode:
            return None
        return "--server-dev-mode is not given"

    def router(self) -> APIRouter:
        router = APIRouter(tags=["Administration"])
        router.add_api_route(
            "/reset_prefix_cache",
            self.reset_prefix_cache,
            methods=["POST"],
            responses=gives(Success),
        )
        router.add_api_route(
            "/is_sleeping", self.is_sleeping, methods=["GET"], responses=gives(Sleeping)
        )
        for path, silent in (
            ("/sleep", self.sleep),
            ("/wake_up", self.wake_up),
            ("/start_profile", _later("profiles on request")),
            ("/stop_profile", _later("profiles on request")),
        ):
            router.add_api_route(path, silent, methods=["POST"], response_class=Response)
        return router

    async def reset_prefix_cache(self) -> Response:
        """Forget cached prefixes."""
        done: Success = {"success": await self.context.engine.reset_prefix_cache()}
        return json_response(done)

    async def sleep(self, level: int = 1) -> Response:
        """Give the model's memory back."""
        await self.context.engine.sleep(level)
        return Response(status_code=200)

    async def wake_up(self) -> Response:
        """Take the memory again."""
        await self.context.engine.wake_up()
        return Response(status_code=200)

    async def is_sleeping(self) -> Response:
        """Whether the engine sleeps."""
        told: Sleeping = {"is_sleeping": await self.context.engine.is_sleeping()}
        return json_response(told)


def _later(what: str) -> Callable[[], Awaitable[Response]]:
    async def not_yet() -> Response:
        """Not there yet."""
        raise ApiError(400, f"{what}: not yet supported", code="unsupported")

    return not_yet
