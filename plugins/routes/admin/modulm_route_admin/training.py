"""Routes for trainers: pauses and weight updates, compatible with vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NotRequired, TypedDict

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from modulm.errors import EngineDead, EngineError, EngineStalled
from modulm_server.errors import ApiError
from modulm_server.flags import ServerConfig
from modulm_server.json_body import bad_field, body_of, json_response, read, request_docs
from modulm_server.metrics import OperationMetrics
from modulm_server.openapi import response_docs
from modulm_server.route import RouteFamily

__all__ = ["Training"]


class Paused(TypedDict):
    """Whether generation is paused."""

    is_paused: bool


class Message(TypedDict):
    """What was done, and the number of the weights afterwards; other fields are vLLM's."""

    message: str
    weight_version: int
    status: NotRequired[str]
    success: NotRequired[bool]
    new_version: NotRequired[str]


class WeightInfo(TypedDict):
    """The version of the weights."""

    weight_version: int


class WorldSize(TypedDict):
    """How many workers there are."""

    world_size: int


class InitRequest(msgspec.Struct):
    """init_info: what the backend of --weight-transfer-config needs to meet the trainer."""

    init_info: dict[str, Any] = {}


class StartRequest(msgspec.Struct):
    """partial: tensors that do not come stay as they are."""

    is_checkpoint_format: bool = True
    partial: bool = False


class FinishRequest(msgspec.Struct):
    """weight_version: the version of the new weights; by default the last one's and one more."""

    weight_version: str | int | None = None


class UpdateRequest(msgspec.Struct):
    """update_info: what the backend needs to take tensors."""

    update_info: dict[str, Any]


class VersionRequest(msgspec.Struct):
    """weight_version: the number of the weights from now on. new_version: the same, by vLLM's name,
    in digits.
    """

    weight_version: int | None = None
    new_version: str | int | None = None


class CheckRequest(msgspec.Struct):
    """action: checksum answers with `checksums`, compare with `match` and `mismatches`, reset sets
    all weights to zero. baseline: the checksums to compare with.
    """

    action: Literal["checksum", "reset", "compare"]
    baseline: dict[str, str] | None = None


class Checked(TypedDict, total=False):
    """Checksums by weight, or whether they equal the baseline and which do not."""

    checksums: dict[str, str]
    match: bool
    mismatches: list[str]
    status: str


class Training(RouteFamily):
    """With --server-dev-mode: `/pause`, `/resume`, `/is_paused`, `/init_weight_transfer_engine`,
    `/start_weight_update`, `/update_weights`, `/finish_weight_update`,
    `/shutdown_weight_transfer_engine`, `/update_weight_version`, `/weight_info`, `/weight_checker`,
    `/get_world_size`.
    """

    name = "training"
    api = 2
    token_paths = ("*",)
    flagged_paths: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            "/pause", "/resume", "/is_paused", "/init_weight_transfer_engine",
            "/start_weight_update", "/update_weights", "/finish_weight_update",
            "/shutdown_weight_transfer_engine", "/update_weight_version", "/weight_info",
            "/weight_checker", "/get_world_size",
        ),
        "--server-dev-mode",
    )  # fmt: skip

    def absent(self) -> str | None:
        if self.context.config.group(ServerConfig).server_dev_mode:
            return None
        return "--server-dev-mode is not set"

    def router(self) -> APIRouter:
        router = APIRouter(tags=["Training"])
        self._operations = OperationMetrics(
            self.context.registry, "rl_weight_update", "weight update"
        )
        for path, answer, schema in (
            ("/is_paused", self.is_paused, Paused),
            ("/weight_info", self.weight_info, WeightInfo),
            ("/get_world_size", self.get_world_size, WorldSize),
        ):
            docs = response_docs(schema)
            router.add_api_route(path, answer, methods=["GET"], responses=docs)
        for path, operation, body in (
            ("/pause", self.pause, None),
            ("/resume", self.resume, None),
            ("/init_weight_transfer_engine", self.init_weight_transfer_engine, InitRequest),
            ("/start_weight_update", self.start_weight_update, StartRequest),
            ("/update_weights", self.update_weights, UpdateRequest),
            ("/finish_weight_update", self.finish_weight_update, FinishRequest),
            ("/shutdown_weight_transfer_engine", self.shutdown_weight_transfer_engine, None),
            ("/update_weight_version", self.update_weight_version, VersionRequest),
        ):
            extra = None if body is None else request_docs(body)
            router.add_api_route(
                path,
                operation,
                methods=["POST"],
                responses=response_docs(Message),
                openapi_extra=extra,
            )
        router.add_api_route(
            "/weight_checker",
            self.weight_checker,
            methods=["POST"],
            responses=response_docs(Checked),
            openapi_extra=request_docs(CheckRequest),
        )
        return router

    def _done(self, message: str, **more: Any) -> Response:
        version = self.context.engine.weight_version
        return json_response({"message": message, "weight_version": version, **more})

    async def pause(self, mode: str = "abort", clear_cache: bool = True) -> Response:
        """Pause generation: hold new requests; mode: abort, wait for, or keep running ones."""
        await self.context.engine.pause_generation(mode=mode, clear_cache=clear_cache)
        return self._done("paused", status="paused")

    async def resume(self) -> Response:
        """Resume generation after a pause."""
        await self.context.engine.resume_generation()
        return self._done("resumed", status="resumed")

    async def is_paused(self) -> Response:
        """Whether generation is paused."""
        answer: Paused = {"is_paused": await self.context.engine.is_paused()}
        return json_response(answer)

    async def weight_info(self) -> Response:
        """The version of the weights."""
        answer: WeightInfo = {"weight_version": await self.context.engine.get_weight_version()}
        return json_response(answer)

    async def get_world_size(self, include_dp: bool = True) -> Response:
        """The number of workers of the engine, and of its replicas if `include_dp`."""
        parallel = self.context.config.parallel
        replicas = parallel.data_parallel_size if include_dp else 1
        answer: WorldSize = {"world_size": parallel.ranks * replicas}
        return json_response(answer)

    async def init_weight_transfer_engine(self, request: Request) -> Response:
        """Connect the workers to the trainer."""
        body = await read(request, InitRequest)
        with self._operations.measure("init"):
            await _whole(self.context.engine.init_weight_transfer_engine(body.init_info))
        return self._done("connected")

    async def start_weight_update(self, request: Request) -> Response:
        """Begin an update of the weights."""
        has_body = await body_of(request)
        body = await read(request, StartRequest) if has_body else StartRequest()
        engine = self.context.engine
        with self._operations.measure("start"):
            await _whole(engine.start_weight_update(body.is_checkpoint_format, body.partial))
        return self._done("started")

    async def update_weights(self, request: Request) -> Response:
        """Receive tensors of the current update."""
        body = await read(request, UpdateRequest)
        with self._operations.measure("update"):
            await _whole(self.context.engine.update_weights(body.update_info))
        return self._done("taken")

    async def finish_weight_update(self, request: Request) -> Response:
        """Switch to the new weights."""
        requested = (
            (await read(request, FinishRequest)).weight_version if await body_of(request) else None
        )
        version = None if requested is None else _version(requested)
        with self._operations.measure("finish"):
            await _whole(self.context.engine.finish_weight_update())
        if version is not None:
            await self.context.engine.update_weight_version(version)
        return self._done("updated")

    async def shutdown_weight_transfer_engine(self) -> Response:
        """Disconnect the workers from the trainer."""
        with self._operations.measure("shutdown"):
            await _whole(self.context.engine.shutdown_weight_transfer_engine())
        return self._done("disconnected")

    async def update_weight_version(self, request: Request) -> Response:
        """Set the version of the weights."""
        body = await read(request, VersionRequest)
        given = body.weight_version if body.new_version is None else body.new_version
        version = _version(given)
        with self._operations.measure("set_version"):
            await self.context.engine.update_weight_version(version)
        return self._done("updated", success=True, new_version=str(version))

    async def weight_checker(self, request: Request) -> Response:
        """Compute checksums of the weights, compare them with a baseline, or reset the weights."""
        body = await read(request, CheckRequest)
        engine = self.context.engine
        if body.action == "reset":
            await _whole(engine.reset_weights())
            return json_response(Checked(status="reset"))
        if body.action == "compare" and body.baseline is None:
            raise bad_field("baseline", "action compare needs a baseline: the answer of checksum")
        sums = await _whole(engine.compute_weight_checksums())
        if body.baseline is None or body.action == "checksum":
            return json_response(Checked(checksums=sums))
        names = sums.keys() | body.baseline.keys()
        wrong = sorted(name for name in names if sums.get(name) != body.baseline.get(name))
        return json_response(Checked(match=not wrong, mismatches=wrong))


async def _whole(operation: Any) -> Any:
    """Await an operation; errors of workers are passed on with their full text."""
    try:
        return await operation
    except (EngineDead, EngineStalled):
        raise
    except EngineError as error:
        raise ApiError(500, str(error), code="engine_error") from error


def _version(value: str | int | None) -> int:
    """Read a version of weights. Raises ApiError(400)."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if not isinstance(value, int):
        message = "must be a number, because versions count the updates of the weights"
        raise bad_field("weight_version", f"weight_version (or new_version) {message}")
    return value
