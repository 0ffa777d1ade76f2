"""The adapters of a server: from its start, by requests that name them, and by two routes
(https://docs.vllm.ai/en/latest/features/lora.html).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from msgspec import Struct
from starlette.responses import PlainTextResponse, Response

from modulm.errors import CheckpointError, ConfigError, RequestError
from modulm.loading.hub import download, is_hub_id
from modulm.plugins import manager
from modulm_adapters.places import inside, read_modules
from modulm_route_adapters.flags import ServedAdaptersConfig
from modulm_server.engine.adapters import Adapter
from modulm_server.json_body import bad_field, read, request_docs
from modulm_server.openapi import response_docs
from modulm_server.route import RouteFamily

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modulm_adapters.resolver import AdapterResolver
    from modulm_server.route import RouteContext

__all__ = ["Adapters"]

_NAME = 256


class LoadRequest(Struct, kw_only=True):
    """`POST /v1/load_lora_adapter`."""

    lora_name: str = ""
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False


class UnloadRequest(Struct, kw_only=True):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str = ""
    lora_int_id: int | None = None


class Adapters(RouteFamily):
    """With adapters: those of --lora-modules, those that resolvers find, and with
    --allow-runtime-lora-updating `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`.
    """

    name = "adapters"
    api = 2

    def __init__(self, context: RouteContext) -> None:
        super().__init__(context)
        self._flags = context.config.group(ServedAdaptersConfig)
        self._folders = [Path(folder) for folder in self._flags.allowed_lora_path or ()]
        self._resolvers: Sequence[AdapterResolver] = ()
        self._finding: dict[str, asyncio.Task[bool]] = {}

    def absent(self) -> str | None:
        if self.context.engine.info.limit("adapters", "slots"):
            return None
        if self._flags.lora_modules or self._flags.allow_runtime_lora_updating:
            given = "lora_modules" if self._flags.lora_modules else "allow_runtime_lora_updating"
            raise ConfigError(given, "needs --enable-lora")
        return "the engine runs without adapters"

    def router(self) -> APIRouter:
        self._load_modules()
        plugins = manager.current()
        names = dict.fromkeys(declared.name for declared in plugins.names("adapter_resolvers"))
        drivers = [plugins.load("adapter_resolvers", name) for name in names]
        made = (driver.of(self.context.config) for driver in drivers)
        self._resolvers = [resolver for resolver in made if resolver is not None]
        if self._resolvers:
            self.context.generation.adapter_finders.append(self.find)
        router = APIRouter(tags=["Adapters"])
        if self._flags.allow_runtime_lora_updating:
            for path, answer, body in (
                ("/v1/load_lora_adapter", self.load, LoadRequest),
                ("/v1/unload_lora_adapter", self.unload, UnloadRequest),
            ):
                router.add_api_route(
                    path,
                    answer,
                    methods=["POST"],
                    openapi_extra=request_docs(body),
                    responses=response_docs(content="text/plain"),
                )
        return router

    def _load_modules(self) -> None:
        """Those of the flags, unless another server of the same engine has loaded them.

        Raises ConfigError for one that cannot be loaded.
        """
        engine, config = self.context.engine, self.context.config
        for module in read_modules(self._flags.lora_modules or ()):
            try:
                path, root = Path(module.path), None
                if not path.exists() and is_hub_id(module.path):
                    root = module.path
                    path = download(root, config.with_(revision=None))
                adapter = Adapter(module.name, str(path), module.parent, root)
                if engine.adapters.get(adapter.name) != adapter:
                    engine.load_adapter(adapter).result()
            except (CheckpointError, RequestError) as error:
                raise ConfigError("lora_modules", f"{module.name}: {error}") from error

    # Requests that name one.

    async def find(self, name: str) -> bool:
        """Load the adapter of this name where a resolver has it; whether it is there now.

        Requests that ask at the same time wait for the same.
        """
        task = self._finding.get(name)
        if task is None:
            task = self._finding[name] = asyncio.get_running_loop().create_task(self._find(name))
            task.add_done_callback(lambda done: self._found(name, done))
        return await asyncio.shield(task)

    def _found(self, name: str, task: asyncio.Task[bool]) -> None:
        del self._finding[name]
        if not task.cancelled():
            task.exception()  # whoever asked may have left

    async def _find(self, name: str) -> bool:
        path = await asyncio.to_thread(self._resolve, name)
        if path is None:
            return False
        try:
            adapter = Adapter(name, str(path), root=name)
            await asyncio.wrap_future(self.context.engine.load_adapter(adapter))
        except RequestError as error:
            if name in self.context.engine.adapters:  # another server process was first
                return True
            error.param = "model"
            raise
        return True

    def _resolve(self, name: str) -> Path | None:
        for resolver in self._resolvers:
            try:
                path = resolver.resolve(name)
            except CheckpointError as error:
                words = f"adapter {name!r} cannot be loaded: {error}"
                raise RequestError(words, "model") from error
            if path is not None:
                return path
        return None

    # Routes.

    async def load(self, request: Request) -> Response:
        """Load an adapter, or load it anew."""
        body = await read(request, LoadRequest)
        name = _named(body.lora_name)
        if not body.lora_path:
            raise bad_field("lora_path", "lora_path: the folder of the adapter is needed")
        path = await asyncio.to_thread(self._allowed, name, body.lora_path)
        adapter = Adapter(name, str(path), body.base_model_name)
        loading = self.context.engine.load_adapter(adapter, replace=body.load_inplace)
        await asyncio.wrap_future(loading)
        return PlainTextResponse(f"Success: adapter {name!r} is loaded.")

    def _allowed(self, name: str, path: str) -> Path:
        """The folder, if adapters may come from there. Raises RequestError."""
        if not self._folders:
            raise RequestError(
                "adapters are loaded from the folders of --allowed-lora-path, and this server has "
                "none", "lora_path",
            )  # fmt: skip
        try:
            return inside(Path(path), self._folders)
        except CheckpointError as error:
            raise RequestError(
                f"adapter {name!r} cannot be loaded: {error}", "lora_path"
            ) from error

    async def unload(self, request: Request) -> Response:
        """Forget an adapter; answers that use it are finished."""
        body = await read(request, UnloadRequest)
        name = _named(body.lora_name)
        await asyncio.wrap_future(self.context.engine.unload_adapter(name))
        return PlainTextResponse(f"Success: adapter {name!r} is unloaded.")


def _named(name: Any) -> str:
    """Raises ApiError(400) for a name that no adapter has."""
    if not isinstance(name, str) or not 0 < len(name) <= _NAME or not name.isprintable():
        raise bad_field("lora_name", f"lora_name: a name of at most {_NAME} characters is needed")
    return name
