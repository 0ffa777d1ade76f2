"""Routes that load, stop and reload the models of a server of several.

`/models/load` and `/models/unload` are those of llama.cpp's router.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, TypedDict

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from modulm.errors import ConfigError
from modulm_server.auth import owner_of
from modulm_server.directory import ModelDirectory, ModelStatus
from modulm_server.errors import ApiError
from modulm_server.json_body import json_response, read, request_docs
from modulm_server.openapi import response_docs
from modulm_server.route import RouteFamily

__all__ = ["ModelRoutes"]


class ModelName(msgspec.Struct):
    """The model to load or stop."""

    model: str


class Nothing(msgspec.Struct):
    """An empty object."""


class Outcome(TypedDict):
    """The state of the model afterwards. memory: in bytes."""

    success: bool
    model: str
    state: str
    memory: int


class Changes(TypedDict):
    """The names of models that were added, changed and removed."""

    added: list[str]
    changed: list[str]
    removed: list[str]


class ModelRoutes(RouteFamily):
    """`/models/load`, `/models/unload`, `/models/reload`."""

    name = "models"
    api = 2
    shared_paths = ("*",)
    flagged_paths: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("/models/load", "/models/unload", "/models/reload"), "--models-config or --models-dir"
    )

    def absent(self) -> str | None:
        return "the server has one model" if self.context.directory is None else None

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/models", tags=["Models"])
        for path, endpoint, schema, answer in (
            ("/load", self.load, ModelName, Outcome),
            ("/unload", self.unload, ModelName, Outcome),
            ("/reload", self.reload, Nothing, Changes),
        ):
            router.add_api_route(
                path,
                endpoint,
                methods=["POST"],
                openapi_extra=request_docs(schema),
                responses=response_docs(answer),
            )
        return router

    @property
    def _directory(self) -> ModelDirectory:
        directory = self.context.directory
        if directory is None:
            raise ApiError(404, "this server has one model")
        return directory

    async def load(self, request: Request) -> Response:
        """Load a model; answers when it is loaded."""
        body = await read(request, ModelName)
        return _outcome(await self._directory.load(body.model, owner_of(request)))

    async def unload(self, request: Request) -> Response:
        """Stop a model when its running requests have ended; answers afterwards."""
        body = await read(request, ModelName)
        return _outcome(await self._directory.unload(body.model, owner_of(request)))

    async def reload(self, request: Request) -> Response:
        """Read the settings of all models again. Running requests continue."""
        await read(request, Nothing)
        try:
            changes = await self._directory.reload()
        except ConfigError as error:
            raise ApiError(400, str(error), param=error.field, code="invalid_settings") from error
        answer: Changes = {
            "added": list(changes.added),
            "changed": list(changes.changed),
            "removed": list(changes.removed),
        }
        return json_response(answer)


def _outcome(status: ModelStatus) -> Response:
    outcome: Outcome = {
        "success": True,
        "model": status.name,
        "state": status.state,
        "memory": status.memory,
    }
    return json_response(outcome)
