"""LoRA adapters of a server, loaded at startup, on the first request that names them, or by routes.

Source of the routes: https://docs.vllm.ai/en/latest/features/lora.html
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fastapi import APIRouter, Request
from msgspec import Struct
from starlette.responses import PlainTextResponse, Response

from modulm.errors import CheckpointError, ConfigError, NotFound, RequestError
from modulm.loading.sources import fetch
from modulm.plugins import manager
from modulm_adapters.places import inside, name_fault, read_modules
from modulm_route_adapters.flags import ServedAdaptersConfig
from modulm_server.absent_fields import LORA, Absent
from modulm_server.auth import current_owner
from modulm_server.engine.adapters import Adapter
from modulm_server.errors import ApiError
from modulm_server.json_body import bad_field, read, request_docs
from modulm_server.openapi import response_docs
from modulm_server.route import RouteFamily

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modulm_adapters.resolver import AdapterResolver
    from modulm_server.route import RouteContext

__all__ = ["Adapters"]


class LoadRequest(Struct, kw_only=True):
    """`POST /v1/load_lora_adapter`."""

    absent: ClassVar[Absent] = LORA

    lora_name: str = ""
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False


class UnloadRequest(Struct, kw_only=True):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str = ""
    lora_int_id: int | None = None


class Adapters(RouteFamily):
    """Loads adapters from --lora-modules and from resolvers. With --allow-runtime-lora-updating,
    serves `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`.
    """

    name = "adapters"
    api = 2
    token_paths = ("*",)
    flagged_paths: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        "--enable-lora and --allow-runtime-lora-updating",
    )

    def __init__(self, context: RouteContext) -> None:
        super().__init__(context)
        self._flags = context.config.group(ServedAdaptersConfig)
        self._folders = [Path(folder) for folder in self._flags.allowed_lora_path or ()]
        self._resolvers: Sequence[AdapterResolver] = ()
        #: By owner, the names that are being loaded.
        self._loading: defaultdict[str, set[str]] = defaultdict(set)
        self._searches: dict[str, asyncio.Task[bool]] = {}

    def absent(self) -> str | None:
        if self.context.engine.info.limit("adapters", "slots"):
            return None
        for name in ("lora_modules", "default_mm_loras", "allow_runtime_lora_updating"):
            if getattr(self._flags, name):
                raise ConfigError(name, "needs --enable-lora")
        return "the engine runs without --enable-lora"

    def router(self) -> APIRouter:
        self._load_modules()
        plugins = manager.current()
        names = dict.fromkeys(declared.name for declared in plugins.names("adapter_resolvers"))
        drivers = [plugins.load("adapter_resolvers", name) for name in names]
        resolvers = (driver.of(self.context.config) for driver in drivers)
        self._resolvers = [resolver for resolver in resolvers if resolver is not None]
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
        """Load the adapters of --lora-modules and --default-mm-loras, unless another server process
        has loaded them.

        Raises ConfigError for one that cannot be loaded.
        """
        engine, config = self.context.engine, self.context.config
        of_media = self._flags.default_mm_loras or {}
        self.context.generation.media_adapters.update({kind: kind for kind in of_media})
        entries = [f"{kind}={path}" for kind, path in of_media.items()]
        for module in read_modules([*(self._flags.lora_modules or ()), *entries]):
            try:
                path, root = Path(module.path), None
                if not path.exists():
                    of_adapter = config.with_(revision=None, load_format="auto")
                    path = fetch(module.path, of_adapter, more=("adapter_model.bin",)) or path
                    root = module.path if path.exists() else None
                adapter = Adapter(module.name, str(path), module.parent, root)
                if engine.adapters.get(adapter.name) != adapter:
                    engine.load_adapter(adapter).result()
            except (CheckpointError, RequestError) as error:
                raise ConfigError("lora_modules", f"{module.name}: {error}") from error

    # Requests that name an adapter.

    async def find(self, name: str) -> bool:
        """Load an adapter by name with a resolver; returns whether it is available now.

        Concurrent requests for the same name share one search.
        """
        task = self._searches.get(name)
        if task is None:
            task = self._searches[name] = asyncio.get_running_loop().create_task(self._find(name))
            task.add_done_callback(lambda done: self._forget_search(name, done))
        return await asyncio.shield(task)

    def _forget_search(self, name: str, task: asyncio.Task[bool]) -> None:
        del self._searches[name]
        if not task.cancelled():
            task.exception()  # retrieve the exception, in case the caller is gone

    async def _find(self, name: str) -> bool:
        path = await asyncio.to_thread(self._resolve, name)
        if path is None:
            return False
        try:
            adapter = Adapter(name, str(path), root=name)
            await asyncio.wrap_future(self.context.engine.load_adapter(adapter))
        except RequestError as error:
            if name in self.context.engine.adapters:  # loaded by another server process
                return True
            error.param = "model"
            raise
        return True

    def _resolve(self, name: str) -> Path | None:
        for resolver in self._resolvers:
            try:
                path = resolver.resolve(name)
            except CheckpointError as error:
                message = f"adapter {name!r} cannot be loaded: {error}"
                raise RequestError(message, "model") from error
            if path is not None:
                return path
        return None

    # Routes.

    async def load(self, request: Request) -> Response:
        """Load an adapter, or reload it."""
        body = await read(request, LoadRequest)
        name = _check_name(body.lora_name)
        if not body.lora_path:
            raise bad_field("lora_path", "lora_path must be the adapter's folder")
        path = await asyncio.to_thread(self._allowed, name, body.lora_path)
        owner = self._owner()
        self._check_owner(name, owner, "load")
        adapter = Adapter(name, str(path), body.base_model_name, owner=owner)
        loading = self._loading[owner or ""]
        loading.add(name)
        try:
            answer = self.context.engine.load_adapter(adapter, replace=body.load_inplace)
            await asyncio.wrap_future(answer)
        finally:
            loading.discard(name)
        return PlainTextResponse(f"Success: adapter {name!r} is loaded.")

    def _owner(self) -> str | None:
        """The owner of what the current request loads; None if all keys share it."""
        return None if self._flags.share_adapters_between_keys else current_owner() or None

    def _check_owner(self, name: str, owner: str | None, what: str) -> None:
        """Check that a key may load or unload a name. Raises RequestError, NotFound, ApiError."""
        if owner is None:
            return
        adapters = self.context.engine.adapters
        present = adapters.get(name)
        if present is not None and present.owner != owner:
            if what == "unload" and present.owner is not None:
                raise NotFound(f"there is no adapter {name!r} here", "lora_name")
            raise RequestError(
                f"adapter {name!r} does not belong to this key: it cannot {what} it", "lora_name"
            )
        owned = {one.name for one in adapters.values() if one.owner == owner}
        owned |= self._loading[owner]
        most = self._flags.max_adapters_per_key
        if what == "load" and name not in owned and len(owned) >= most:
            raise ApiError(
                429, f"this key has {most} adapters (--max-adapters-per-key): unload one",
                code="overloaded", param="lora_name",
            )  # fmt: skip

    def _allowed(self, name: str, path: str) -> Path:
        """Check that an adapter may be loaded from a path. Raises RequestError."""
        if not self._folders:
            raise RequestError(
                "loading from paths is not enabled: start the server with --allowed-lora-path",
                "lora_path",
            )  # fmt: skip
        try:
            return inside(Path(path), self._folders)
        except CheckpointError as error:
            raise RequestError(
                f"adapter {name!r} cannot be loaded: {error}", "lora_path"
            ) from error

    async def unload(self, request: Request) -> Response:
        """Unload an adapter. Running requests that use it are finished."""
        body = await read(request, UnloadRequest)
        name = _check_name(body.lora_name)
        self._check_owner(name, self._owner(), "unload")
        await asyncio.wrap_future(self.context.engine.unload_adapter(name))
        return PlainTextResponse(f"Success: adapter {name!r} is unloaded.")


def _check_name(name: Any) -> str:
    """Validate an adapter name. Raises ApiError(400)."""
    if not isinstance(name, str):
        raise bad_field("lora_name", "lora_name must be a text")
    if (fault := name_fault(name)) is not None:
        raise bad_field("lora_name", f"lora_name {fault}")
    return name
