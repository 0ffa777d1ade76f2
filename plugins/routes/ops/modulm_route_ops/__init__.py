"""Health checks and metrics: /health, /ready, /ping, /load, /version, /metrics, /server_info."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NotRequired, TypedDict

from fastapi import APIRouter
from starlette.responses import Response

import modulm
from modulm import plugins
from modulm.config.schema.catalog import catalog
from modulm.errors import EngineError
from modulm_plugin_lock import name_conflicts
from modulm_server.engine.metrics import Metrics
from modulm_server.errors import ApiError, describe, error_body
from modulm_server.flags import ServerConfig
from modulm_server.json_body import json_response
from modulm_server.memory_metrics import EngineMemory
from modulm_server.metrics import exposition, merged, with_prefixes
from modulm_server.openapi import response_docs
from modulm_server.route import RouteFamily

__all__ = ["Ops"]


class Load(TypedDict):
    """The number of requests in progress."""

    server_load: int


class Replica(TypedDict):
    """A replica's status: ok, stalled, draining, starting or dead. The log has the reason."""

    rank: int
    status: str
    restarts: int


class Health(TypedDict):
    """The server's health, for llama.cpp's clients; the HTTP status has the same information.
    "degraded": some replicas work, and the others are being restarted. "unavailable", with an
    `error` and status 503: none works. plugin_conflicts: names that two packages offer, as
    kind/name; the log has the packages.
    """

    status: str
    plugin_conflicts: NotRequired[list[str]]
    replicas: NotRequired[list[Replica]]


class Version(TypedDict):
    """The version of modulm."""

    version: str


class ServerInfo(Version):
    """The served model, and every flag that differs from its default. vllm_config: all flags by
    group, as vLLM's clients read them.
    """

    models: list[str]
    max_model_len: int
    dtype: str
    config: dict[str, Any]
    vllm_config: NotRequired[dict[str, Any]]


class Ops(RouteFamily):
    """Routes for operators of the server."""

    name = "ops"
    api = 2
    shared_paths = ("*",)
    token_paths = ("*",)

    def router(self) -> APIRouter:
        self._conflicts = list(name_conflicts(plugins.current()))
        self._memory: EngineMemory | None = None
        if self.context.directory is None:
            self._memory = EngineMemory(self.context.models[0], self.context.engine)
            self.context.registry.register(self._memory)
        router = APIRouter(tags=["Operations"])
        for path, check, answer_type in (
            ("/health", self.health, Health),
            ("/ping", self.health, Health),
            ("/ready", self.ready, None),
        ):
            router.add_api_route(
                path,
                check,
                methods=["GET"],
                response_class=Response,
                responses=response_docs(answer_type),
            )
            router.add_api_route(path, check, methods=["HEAD"], include_in_schema=False)
        router.add_api_route("/ping", self.health, methods=["POST"], include_in_schema=False)
        for path, endpoint, answer in (
            ("/load", self.load, Load),
            ("/version", self.version, Version),
            ("/server_info", self.server_info, ServerInfo),
        ):
            router.add_api_route(path, endpoint, methods=["GET"], responses=response_docs(answer))
        router.add_api_route(
            "/metrics",
            self.metrics,
            methods=["GET"],
            response_class=Response,
            responses=response_docs(content="text/plain"),
        )
        return router

    async def health(self) -> Response:
        """Health check: 200 while an engine works, else 503."""
        replicas: list[Replica] = [
            {"rank": r.rank, "status": r.status, "restarts": r.restarts}
            for r in self.context.engine.replicas
        ]
        try:
            await self.context.engine.check_health()
        except EngineError as error:
            if not replicas:
                raise
            answer = describe(error)
            body = {**error_body(answer), "status": "unavailable", "replicas": replicas}
            return json_response(body, answer.status, answer.headers)
        status: Health = {"status": "ok"}
        if replicas:
            if any(replica["status"] != "ok" for replica in replicas):
                status["status"] = "degraded"
            status["replicas"] = replicas
        if self._conflicts:
            status["plugin_conflicts"] = self._conflicts
        return json_response(status)

    async def ready(self) -> Response:
        """Readiness check: 200 while the server accepts requests."""
        self.context.generation.check_open()
        await self.context.engine.check_health()
        full = self.context.config.scheduler.max_num_queued_reqs
        if full is not None and self._waiting() >= full:
            raise ApiError(
                503, "the queue is full", code="overloaded", headers={"Retry-After": "1"}
            )
        return Response(status_code=200)

    def _waiting(self) -> int:
        stats = self.context.engine.stats
        return 0 if stats is None else int(stats.waiting)

    async def load(self) -> Response:
        """The number of requests in progress."""
        load: Load = {"server_load": self.context.engine.active}
        return json_response(load)

    async def version(self) -> Response:
        """The version of modulm."""
        version: Version = {"version": modulm.__version__}
        return json_response(version)

    async def metrics(self) -> Response:
        """Metrics of the engine and of all server processes, in Prometheus' text format."""
        if self._memory is not None:
            await self._memory.measure()
        body, kind = exposition(self.context.registry)
        engine = self.context.engine
        others = await engine.reports()
        if others:
            body = merged(body, others, Metrics.SHARED)
        body = with_prefixes(body, self.context.config.group(ServerConfig).metrics_prefix)
        return Response(body, media_type=None, headers={"Content-Type": kind})

    async def server_info(self, config_format: Literal["text", "json"] = "text") -> Response:
        """Show every flag that differs from its default, without secrets. config_format: with
        json, all flags by group too.
        """
        config = self.context.config
        changed = _shown(config.changed())
        info = self.context.engine.info
        answer: ServerInfo = {
            "version": modulm.__version__,
            "models": list(self.context.models),
            "max_model_len": info.max_model_len,
            "dtype": str(info.dtype),
            "config": changed,
        }
        if config_format == "json":
            answer["vllm_config"] = _by_group(dict(_values(config)))
        return json_response(answer)


def _values(config: Any) -> Iterator[tuple[str, Any]]:
    return ((spec.name, value) for spec, value in config.values())


_SECRETS = ("api_key", "api_key_file", "api_keys_file", "hf_token", "ssl_keyfile")


def _shown(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags as JSON, without secrets."""
    return {
        name: "(set)" if name in _SECRETS and value else _plain(value)
        for name, value in flags.items()
    }


#: Between the words of a class's name.
_BORDER = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def _by_group(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags under the names of vLLM's configurations (`model_config`). A group with one flag of its
    own name is that flag's table, null without one.
    """
    groups: dict[str, Any] = {}
    for group in catalog().groups:
        title = group.cls.title.replace("LoRA", "Lora")
        if title.endswith("Config"):
            name = _BORDER.sub("_", title).lower()
            own = _shown({f.name: flags[f.name] for f in group.flags if f.name in flags})
            groups[name] = own[name] or None if own.keys() == {name} else own
    return groups


def _plain(value: Any) -> Any:
    """Convert a flag's value to JSON."""
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)
