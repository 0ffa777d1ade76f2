"""Development routes: prefix cache, sleep mode, calls into workers and profiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypedDict

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from modulm.errors import EngineDead, EngineError, EngineStalled, EngineTimeout
from modulm_frontend.flags import ProfilerConfig
from modulm_server.errors import ApiError
from modulm_server.flags import ServerConfig
from modulm_server.json_body import json_response, read, request_docs
from modulm_server.metrics import OperationMetrics
from modulm_server.openapi import response_docs
from modulm_server.route import RouteFamily
from modulm_server.running_requests import running_requests

__all__ = ["Admin"]


class Success(TypedDict):
    """Whether the operation succeeded."""

    success: bool


class Sleeping(TypedDict):
    """Whether the engine sleeps."""

    is_sleeping: bool


class Slept(TypedDict, total=False):
    """What the engine does now: sleeping or awake. level: of sleep. tags: of the request."""

    status: str
    level: int
    tags: list[str] | None


class Released(TypedDict):
    """That the memory of the KV cache is free."""

    status: str


class Results(TypedDict):
    """The answers by rank: objects, arrays and nulls as they are, other values as text."""

    results: list[Any]


class Call(msgspec.Struct):
    """A call into workers. method: a registered worker function, or a method of --worker-cls;
    timeout: in seconds.
    """

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


class AbortRequest(msgspec.Struct):
    """request_ids: X-Request-Ids, or ids of responses; null or none: all requests."""

    request_ids: list[str] | None = None


class Aborted(TypedDict):
    """How many requests were ended."""

    status: str
    aborted: int


class Admin(RouteFamily):
    """With --server-dev-mode: `/reset_prefix_cache`, `/reset_mm_cache`, `/reset_encoder_cache`,
    `/sleep`, `/release_kv_cache_memory`, `/wake_up`, `/is_sleeping`, `/collective_rpc`,
    `/abort_requests`. With it or with --profiler-config: `/start_profile`, `/stop_profile`.
    """

    name = "admin"
    api = 2
    shared_paths = ("/abort_requests",)
    token_paths = ("*",)
    flagged_paths: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            (
                "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/sleep",
                "/release_kv_cache_memory", "/wake_up", "/is_sleeping", "/collective_rpc",
                "/abort_requests",
            ),
            "--server-dev-mode",
        ),
        **dict.fromkeys(
            ("/start_profile", "/stop_profile"), "--server-dev-mode or --profiler-config"
        ),
    }  # fmt: skip

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
        self._operations = OperationMetrics(self.context.registry, "sleep_mode", "sleep mode")
        router.add_api_route(
            "/reset_prefix_cache",
            self.reset_prefix_cache,
            methods=["POST"],
            responses=response_docs(Success),
        )
        for path, cache in (
            ("/reset_mm_cache", self.reset_mm_cache),
            ("/reset_encoder_cache", self.reset_encoder_cache),
        ):
            router.add_api_route(path, cache, methods=["POST"], responses=response_docs(Success))
        router.add_api_route(
            "/release_kv_cache_memory",
            self.release_kv_cache_memory,
            methods=["POST"],
            responses=response_docs(Released),
        )
        router.add_api_route(
            "/is_sleeping", self.is_sleeping, methods=["GET"], responses=response_docs(Sleeping)
        )
        router.add_api_route(
            "/collective_rpc",
            self.collective_rpc,
            methods=["POST"],
            responses=response_docs(Results),
            openapi_extra=request_docs(Call),
        )
        router.add_api_route(
            "/abort_requests",
            self.abort_requests,
            methods=["POST"],
            responses=response_docs(Aborted),
            openapi_extra=request_docs(AbortRequest),
        )
        for path, answer in (("/sleep", self.sleep), ("/wake_up", self.wake_up)):
            router.add_api_route(path, answer, methods=["POST"], responses=response_docs(Slept))
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

    async def reset_mm_cache(self) -> Response:
        """Clear this server process's cache of processed images, audio and video."""
        self.context.generation.media.clear_cache()
        return json_response(Success(success=True))

    async def reset_encoder_cache(self) -> Response:
        """Clear the outputs of encoders, and with them the prefix cache."""
        return await self.reset_prefix_cache()

    async def sleep(
        self, level: int = 1, mode: Literal["abort", "wait", "keep"] | None = None
    ) -> Response:
        """Free memory. Level 0 only pauses, 1 frees the KV cache and moves weights of devices to
        host memory, 2 discards both.

        mode: running requests are ended, end by themselves, or are suspended (level 0). Without it
        they are suspended at level 0, and the others are refused while requests run.
        """
        engine = self.context.engine
        with self._operations.measure("sleep"):
            if mode is not None:
                await engine.pause_generation(mode=mode, clear_cache=False)
            try:
                await engine.sleep(level)
            finally:
                if mode is not None:
                    await engine.resume_generation()
        return json_response(Slept(status="sleeping", level=level))

    async def release_kv_cache_memory(self) -> Response:
        """Free the KV cache of an engine that sleeps at level 0; `/wake_up` allocates it again."""
        with self._operations.measure("release_kv_cache_memory"):
            await self.context.engine.release_kv_cache_memory()
        return json_response(Released(status="kv_cache_released"))

    async def wake_up(self, tags: Annotated[list[str] | None, Query()] = None) -> Response:
        """Wake up: allocate the memory that /sleep freed. `tags=weights`: only the weights'."""
        with self._operations.measure("wake_up"):
            await self.context.engine.wake_up(tags)
            asleep = await self.context.engine.is_sleeping()
        return json_response(Slept(status="sleeping" if asleep else "awake", tags=tags))

    async def is_sleeping(self) -> Response:
        """Whether the engine sleeps."""
        answer: Sleeping = {"is_sleeping": await self.context.engine.is_sleeping()}
        return json_response(answer)

    async def abort_requests(self, request: Request) -> Response:
        """End requests of all API keys, which answer with what they have."""
        body = await read(request, AbortRequest)
        ids = body.request_ids or None
        count = await running_requests(request.scope).abort(ids, owner=None)
        answer: Aborted = {"status": "aborted", "aborted": count}
        return json_response(answer)

    async def collective_rpc(self, request: Request) -> Response:
        """Call a function in every worker."""
        call = await read(request, Call)
        try:
            results = await self.context.engine.collective_rpc(
                call.method, call.timeout, call.args, call.kwargs
            )
        except (EngineDead, EngineStalled):
            raise
        except EngineTimeout as error:
            raise ApiError(504, str(error), code="timeout") from error
        except EngineError as error:
            raise ApiError(500, str(error), code="engine_error") from error
        answer: Results = {"results": [_as_json(result) for result in results]}
        return Response(msgspec.json.encode(answer, enc_hook=str), media_type="application/json")


def _as_json(result: Any) -> Any:
    """Convert a result as vLLM's route does: values other than objects, arrays and null become
    text.
    """
    return result if result is None or isinstance(result, dict | list) else str(result)
