"""Builds the application: route families from plugins, with API keys, limits and error bodies."""

from __future__ import annotations

import logging
import re
import time
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Match, Mount, Route, WebSocketRoute

import modulm
from modulm.errors import ConfigError, ModulmError, PluginBroken, PluginConflict
from modulm.plugins import manager
from modulm.plugins.index import is_first_party
from modulm_chat.conversation import load_template
from modulm_chat.sandbox import SandboxedRenderer
from modulm_plugin_lock import name_conflicts
from modulm_server.api_keys import read_keys
from modulm_server.auth import check_open_paths, guard, open_paths
from modulm_server.errors import exception_handler, respond
from modulm_server.flags import ServerConfig
from modulm_server.generation import GenerationService
from modulm_server.hosts import HostCheck
from modulm_server.json_body import bad_field
from modulm_server.loopback import LoopbackClient
from modulm_server.metrics import HttpMetrics, MediaCacheMetrics, exposition
from modulm_server.openapi import DescribedApp
from modulm_server.request_guard import RequestGuard
from modulm_server.request_log import RequestLog
from modulm_server.route import RouteContext, RouteFamily
from modulm_server.running_requests import RunningRequests

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, MutableMapping, Sequence

    from starlette.types import ASGIApp

    from modulm.contracts.config import EngineConfig
    from modulm.plugins.manager import PluginManager
    from modulm_server.directory import ModelDirectory
    from modulm_server.engine.client import EngineClient

__all__ = [
    "ModelHost",
    "ModelRoutes",
    "Served",
    "create_app",
    "import_routes",
    "model_routes",
    "served_names",
]

log = logging.getLogger("modulm_server")

_HEADER_COUNT = 256
_HEADER_BYTES = 65_536
#: A parameter in a route's path, and sample values for typed parameters.
_PARAMETER = re.compile(r"{\w+:?(\w*)}")
_EXAMPLES = {"int": "1", "float": "1.0", "uuid": "00000000-0000-0000-0000-000000000000"}


@frozen(eq=False)
class Served:
    """The application and its parts.

    app: the whole application, for uvicorn. api: the FastAPI object inside. families: to start and
    stop with the server.
    """

    app: ASGIApp
    api: FastAPI
    generation: GenerationService
    families: tuple[RouteFamily, ...]
    directory: ModelDirectory | None = None

    async def start(self) -> None:
        """Start the families' background work, and models of a server of several. Raises
        ModulmError if one cannot start.
        """
        await _start(self.families)
        if self.directory is not None:
            await self.directory.start()

    async def stop(self) -> None:
        """Stop the families' background work."""
        try:
            if self.directory is not None:
                await self.directory.stop()
        finally:
            await _stop(self.families)
            self.generation.media.close()


async def _start(families: Sequence[RouteFamily]) -> None:
    """Start the background work of all families. Raises ModulmError: a server never runs without
    routes that it has announced.
    """
    for family in families:
        try:
            await family.start()
        except Exception as error:
            message = f"the routes of {family.name!r} could not be started: {error}"
            raise PluginBroken(message) from error


async def _stop(families: Sequence[RouteFamily]) -> None:
    """Stop the background work of all families, also if that of some fails."""
    for family in families:
        try:
            await family.stop()
        except Exception:
            log.exception("Route family %s failed to stop", family.name)


class ModelHost(Protocol):
    """What makes an application the front end of several models."""

    directory: ModelDirectory
    stores: MutableMapping[str, Any]
    loopback: LoopbackClient

    def dispatched(self, family: RouteFamily, path: str, app: ASGIApp) -> ASGIApp:
        """The endpoint that passes a route's requests on to models. app: the front end's own."""


def create_app(engine: EngineClient, config: EngineConfig, host: ModelHost | None = None) -> Served:
    """Build the server's application around a running engine.

    host: on a server of several models; the engine is then `FrontEngine`. Raises ConfigError for an
    invalid template, key file or middleware, PluginConflict if two families serve the same path.
    """
    server = config.group(ServerConfig)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(engine.metrics)
    http = HttpMetrics(registry)
    engine.report_by(lambda: str(exposition(registry)[0], "utf-8"))
    keys = read_keys(server)
    generation = _generation(engine, config, keys.many)
    if host is None:
        _count_work(generation, registry)
    loopback = LoopbackClient() if host is None else host.loopback
    directory = None if host is None else host.directory
    context = RouteContext(
        engine=engine,
        config=config,
        models=generation.models,
        created=int(time.time()),
        generation=generation,
        registry=registry,
        loopback=loopback,
        directory=directory,
        stores={} if host is None else host.stores,
    )
    api = _api(server)
    plugins = manager.current()
    families = _families(context, plugins, api.state)
    if server.tokens_only:
        _keep_token_paths(families)
    _warn_of_conflicts(plugins)
    if host is not None:
        _dispatch(families, host)
    _add_routes(api, families)
    _add_middleware(api, server)
    ours = list(api.router.routes)
    plugins.hook.modulm_app_created(app=api, config=config)
    _move_hook_routes_last(api, ours)
    check_open_paths(server, api.router.routes)
    owners = {id(route): family for family, router in families.items() for route in router.routes}
    guard(api.router.routes, keys, open_paths(server), owners, server.api_server_count or 1)
    guarded = RequestGuard(
        api,
        body_limit=server.max_request_bytes,
        inflight=server.max_inflight_bytes,
        silence=server.request_timeout,
        header_count=server.h11_max_header_count or _HEADER_COUNT,
        header_bytes=server.h11_max_incomplete_event_size or _HEADER_BYTES,
        show_id=server.enable_request_id_headers,
        stacks=server.log_error_stack,
        observe=http.observe,
        socket=http.socket,
        hosts=HostCheck.of(server, bool(keys)),
        answers=loopback.answers,
        running=RunningRequests(server.api_server_count or 1),
        uploads=tuple(path for family in families for path in family.upload_paths),
    )
    loopback.app = guarded
    return Served(guarded, api, generation, tuple(families), directory)


@frozen(eq=False)
class ModelRoutes:
    """The routes of one of a server's models. endpoints: by method ("" for a WebSocket) and path,
    without authentication, which the front end does. registry: the metrics of these routes.
    """

    generation: GenerationService
    families: tuple[RouteFamily, ...]
    endpoints: Mapping[tuple[str, str], ASGIApp]
    registry: CollectorRegistry

    async def start(self) -> None:
        """Start the families' background work. Raises ModulmError if one cannot start."""
        await _start(self.families)

    async def stop(self) -> None:
        """Stop the families' background work."""
        try:
            await _stop(self.families)
        finally:
            self.generation.media.close()
            self.generation.work.close()


def model_routes(
    engine: EngineClient,
    config: EngineConfig,
    stores: MutableMapping[str, Any],
    loopback: LoopbackClient,
) -> ModelRoutes:
    """Build the routes of one model behind the front end of several. Raises ConfigError."""
    keys = read_keys(config.group(ServerConfig))
    generation = _generation(engine, config, keys.many)
    registry = CollectorRegistry(auto_describe=False)
    _count_work(generation, registry)
    context = RouteContext(
        engine=engine,
        config=config,
        models=generation.models,
        created=int(time.time()),
        generation=generation,
        registry=registry,
        loopback=loopback,
        front=False,
        stores=stores,
    )
    families = _families(context, manager.current(), State())
    endpoints: dict[tuple[str, str], ASGIApp] = {}
    for family, router in families.items():
        for route in router.routes:
            if isinstance(route, Route | WebSocketRoute) and route.path not in family.shared_paths:
                for method in _methods(route):
                    endpoints.setdefault((method, route.path), route.app)
    return ModelRoutes(generation, tuple(families), endpoints, registry)


def _count_work(generation: GenerationService, registry: CollectorRegistry) -> None:
    """Register the metrics of a model's front end."""
    registry.register(generation.tool_calls)
    registry.register(
        MediaCacheMetrics(generation.models[0], lambda: generation.media.cache_counts)
    )


def _methods(route: BaseRoute) -> Collection[str]:
    return getattr(route, "methods", None) or ("",)


def _dispatch(families: Mapping[RouteFamily, APIRouter], host: ModelHost) -> None:
    """Let models answer the requests of all routes that are not shared."""
    for family, router in families.items():
        if "*" in family.shared_paths:
            continue
        for route in router.routes:
            if isinstance(route, Route | WebSocketRoute) and route.path not in family.shared_paths:
                route.app = host.dispatched(family, route.path, route.app)


def import_routes() -> None:
    """Import the installed route families early, so that `create_app` is faster, and what FastAPI
    imports when it gets its first parameter.

    `create_app` reports those that cannot be imported.
    """
    APIRouter().add_api_route("/{name}", _first_route)
    plugins = manager.current()
    for declared in plugins.names("routes"):
        with suppress(Exception, SystemExit):
            plugins.load_declared(declared)


def _first_route(name: str) -> None:
    """Serve nothing."""


def served_names(config: EngineConfig) -> tuple[str, ...]:
    """The names of the model in the API; responses show the first."""
    return config.model.served_model_name or (config.model.model,)


def _generation(engine: EngineClient, config: EngineConfig, many_keys: bool) -> GenerationService:
    server = config.group(ServerConfig)
    template = None if server.chat_template is None else load_template(server.chat_template)
    if template is not None and engine.tokenizer is not None and engine.tokenizer.chat is not None:
        raise ConfigError(
            "chat_template", "this model's tokenizer encodes messages itself, without a template"
        )
    return GenerationService(
        engine=engine,
        config=config,
        models=served_names(config),
        template=template,
        request_log=RequestLog.of(config),
        request_renderer=SandboxedRenderer() if server.trust_request_chat_template else None,
        tenants=many_keys and not server.share_prefix_cache_between_keys,
    )


def _api(server: ServerConfig) -> FastAPI:
    pages = not server.disable_fastapi_docs
    api = DescribedApp(
        title="modulm",
        version=modulm.__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json" if pages else None,
        redirect_slashes=False,
    )
    for kind in (ModulmError, HTTPException, Exception):
        api.add_exception_handler(kind, exception_handler(server.log_error_stack))
    api.add_exception_handler(RequestValidationError, _invalid_parameter)  # type: ignore[arg-type]
    return api


async def _invalid_parameter(request: Any, error: RequestValidationError) -> Any:
    """Convert FastAPI's error about a path or query parameter to a 400 in OpenAI's form."""
    first = error.errors()[0]
    name = str(first["loc"][-1]) if first.get("loc") else None
    return respond(bad_field(name, f"{name}: {first['msg']}"))


def _families(
    context: RouteContext, plugins: PluginManager, state: State
) -> dict[RouteFamily, APIRouter]:
    """Create the installed route families and their routers, first-party families first.

    Families that do not apply are left out. Broken ones are logged and left out. Raises
    PluginConflict for a name that two packages provide. state: gets the `flagged_paths` of all.
    """
    families: dict[RouteFamily, APIRouter] = {}
    state.flagged_paths = {}
    names = dict.fromkeys(declared.name for declared in plugins.names("routes"))
    declarations = [plugins.find("routes", name) for name in names]
    for declared in sorted(declarations, key=lambda offer: not is_first_party(offer.distribution)):
        try:
            family: RouteFamily = plugins.load_declared(declared)(context)
            state.flagged_paths.update(family.flagged_paths)
            reason = _absence(family)
            if reason is None:
                families[family] = family.router()
            else:
                log.debug("Routes %s are not served: %s", declared.name, reason)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            log.error(
                "Routes %s of %s are not served: %s: %s",
                declared.name,
                declared.origin,
                type(error).__name__,
                error,
            )
    return families


def _keep_token_paths(families: Mapping[RouteFamily, APIRouter]) -> None:
    """Remove all routes that a server for token ids alone does not have."""
    for family, router in families.items():
        if "*" not in family.token_paths:
            router.routes[:] = [
                route
                for route in router.routes
                if getattr(route, "path", None) in family.token_paths
            ]


def _warn_of_conflicts(plugins: PluginManager) -> None:
    """Log each name that two packages offer; those of hook plugins are logged when they load."""
    for name, message in name_conflicts(plugins).items():
        if not name.startswith("hooks/"):
            log.warning("%s", message)


def _absence(family: RouteFamily) -> str | None:
    """Why a family is not served, or None. On a server of several models, each model decides which
    of its routes it serves.
    """
    context, shared = family.context, "*" in family.shared_paths
    if shared and not context.front:
        return "the front end serves it"
    return None if context.directory is not None and not shared else family.absent()


def _add_routes(api: FastAPI, families: Mapping[RouteFamily, APIRouter]) -> None:
    """Add the routes of all families.

    A route whose requests an earlier family would all answer is left out with a warning if only
    that family is this project's; otherwise raises PluginConflict. Logs a warning if a pattern also
    matches paths of an earlier family, which keeps them.
    """
    owned: list[tuple[BaseRoute, RouteFamily]] = []
    for family, router in families.items():
        others = list(owned)
        for route in router.routes:
            conflict = next(((r, o) for r, o in others if _matches(r, route)), None)
            if conflict is not None and _is_ours(conflict[1]) and not _is_ours(family):
                log.warning(
                    "%s of routes %r (%s) is left out: it is served by routes %r",
                    *(_label(route), family.name, _origin(family), conflict[1].name),
                )
                continue
            if conflict is not None:
                raise PluginConflict(
                    f"{_label(route)} of routes {family.name!r} conflicts with "
                    f"{_label(conflict[0])} of routes {conflict[1].name!r}; "
                    "disable one of them with --plugins"
                )
            owner = next(((r, o) for r, o in others if _matches(route, r)), None)
            if owner is not None:
                log.warning(
                    "%s of routes %r also matches %s, which is served by routes %r",
                    *(_label(route), family.name, _label(owner[0]), owner[1].name),
                )
            owned.append((route, family))
            api.router.routes.append(route)


def _is_ours(family: RouteFamily) -> bool:
    return is_first_party(type(family).__module__.partition(".")[0])


def _origin(family: RouteFamily) -> str:
    """The distribution of a family, or its module if it was registered at run time."""
    offers = [d for d in manager.current().names("routes") if d.name == family.name]
    return offers[0].origin if offers else type(family).__module__


def _move_hook_routes_last(api: FastAPI, ours: list[BaseRoute]) -> None:
    """Sort the server's routes before those of hook plugins; warn about routes that are hidden."""
    added = [
        route
        for route in api.router.routes
        if all(route is not server_route for server_route in ours)
    ]
    api.router.routes.sort(key=lambda route: any(route is other for other in added))
    for route in added:
        if any(_matches(server_route, route) for server_route in ours):
            log.warning("%s from a hook plugin is hidden by a route of the server", _label(route))


def _label(route: BaseRoute) -> str:
    methods = ",".join(sorted(getattr(route, "methods", None) or [type(route).__name__]))
    return f"{methods} {getattr(route, 'path', route)}"


def _matches(route: BaseRoute, other: BaseRoute) -> bool:
    """Whether `route` would answer a request for `other`."""
    pattern = str(getattr(other, "path", ""))
    path = _PARAMETER.sub(lambda match: _EXAMPLES.get(match[1], "x"), pattern)
    path += "/x" if isinstance(other, Mount) else ""
    if isinstance(route, Route) and not route.param_convertors and route.path != path:
        return False  # what `Route.matches` would find out with a regular expression
    kind = "websocket" if isinstance(other, WebSocketRoute) else "http"
    scope = {"type": kind, "path": path, "headers": []}
    methods = getattr(other, "methods", None) or {"GET"}
    return any(route.matches({**scope, "method": m})[0] is Match.FULL for m in methods)


def _add_middleware(api: FastAPI, server: ServerConfig) -> None:
    if server.allowed_origins:
        if "*" in server.allowed_origins and server.allow_credentials:
            raise ConfigError(
                "allow_credentials", "cannot be combined with allowed_origins '*': list the origins"
            )
        api.add_middleware(
            CORSMiddleware,
            allow_origins=list(server.allowed_origins),
            allow_credentials=server.allow_credentials,
            allow_methods=list(server.allowed_methods),
            allow_headers=list(server.allowed_headers),
        )
    for path in server.middleware:
        _add_named(api, path)


def _add_named(api: FastAPI, path: str) -> None:
    """Add middleware by import path: a class, or a coroutine function for `app.middleware`."""
    module, _, name = path.rpartition(".")
    try:
        middleware = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError("middleware", f"{path!r} cannot be imported: {error}") from error
    if isinstance(middleware, type):
        api.add_middleware(middleware)  # type: ignore[arg-type]
    else:
        api.middleware("http")(middleware)
