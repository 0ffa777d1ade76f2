"""The route family: what is served where."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from modulm_route_openai.chat import Chat
from modulm_route_openai.completions import Completions
from modulm_route_openai.schema import ChatRequest, CompletionRequest
from modulm_server.errors import model_error
from modulm_server.json_body import json_response, read, takes
from modulm_server.route import RouteFamily

__all__ = ["OpenAI"]


class OpenAI(RouteFamily):
    """`/v1/models`, `/v1/completions`, `/v1/chat/completions`."""

    name = "openai"
    api = 2

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1", tags=["OpenAI"])
        completions, chat = Completions(self.context), Chat(self.context)

        @router.get("/models")
        async def models() -> Response:
            """The models that are served."""
            return json_response(
                {"object": "list", "data": [self._card(name) for name in self.context.models]}
            )

        @router.head("/models")
        async def models_head() -> Response:
            """Whether models are served."""
            return json_response({})

        @router.get("/models/{model:path}")
        async def model(model: str) -> Response:
            """One model."""
            if model not in self.context.models:
                raise model_error(model)
            return json_response(self._card(model))

        @router.post("/completions", openapi_extra=takes(CompletionRequest))
        async def complete(request: Request) -> Response:
            """Go on with a prompt."""
            return await completions.answer(request, await read(request, CompletionRequest))

        @router.post("/chat/completions", openapi_extra=takes(ChatRequest))
        async def converse(request: Request) -> Response:
            """Answer a conversation."""
            return await chat.answer(request, await read(request, ChatRequest))

        return router

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.context.created,
            "owned_by": "modulm",
            "root": self.context.models[0],
            "parent": None,
            "max_model_len": self.context.engine.info.max_model_len,
        }
