"""The route family of OpenAI's models, completions and chat."""

from __future__ import annotations

from typing import Literal, NotRequired

from fastapi import APIRouter, Request
from starlette.responses import Response

from modulm_route_openai.chat import Chat
from modulm_route_openai.completions import Completions
from modulm_route_openai.derender import (
    ChatDerenderRequest,
    CompletionDerenderRequest,
    Derender,
    DerenderedChat,
    DerenderedCompletion,
)
from modulm_route_openai.generate import (
    AbortRequest,
    Generate,
    GenerateAnswer,
    GenerateRequest,
    abort_requests,
)
from modulm_route_openai.models import Models
from modulm_route_openai.objects import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    ModelCard,
    ModelInfo,
    ModelList,
    ModelPage,
)
from modulm_route_openai.schema import ChatBatchRequest, ChatRequest, CompletionRequest
from modulm_route_openai.scoring import ScoringAnswer, ScoringRequest, score
from modulm_server.json_body import json_response, read, request_docs
from modulm_server.openapi import ErrorAnswer, response_docs
from modulm_server.rendering import Rendered
from modulm_server.route import RouteFamily

__all__ = ["OpenAI"]


class _Refusal(ErrorAnswer):
    """OpenAI's error, or Anthropic's, which has a `type`."""

    type: NotRequired[Literal["error"]]


class OpenAI(RouteFamily):
    """`/v1/models`, `/v1/completions`, `/v1/chat/completions`, `/generative_scoring`,
    `/inference/v1/generate`, `/inference/v1/abort_requests`.
    """

    name = "openai"
    api = 2
    shared_paths = ("/v1/models", "/v1/models/{model:path}", "/inference/v1/abort_requests")
    token_paths = (*shared_paths, "/inference/v1/generate")

    def router(self) -> APIRouter:
        without_prefix = APIRouter(tags=["OpenAI"])
        router = APIRouter(prefix="/v1", tags=["OpenAI"])
        completions, chat = Completions(self.context), Chat(self.context)
        self._chat = chat
        self._derender = Derender(self.context)

        models = Models(self.context)
        router.add_api_route(
            "/models",
            models.listed,
            methods=["GET"],
            responses=response_docs(ModelList | ModelPage, failure=_Refusal),
        )

        @router.head("/models", response_class=Response)
        async def models_head() -> Response:
            """Whether models are served."""
            return json_response({})

        router.add_api_route(
            "/models/{model:path}",
            models.one,
            methods=["GET"],
            responses=response_docs(ModelCard | ModelInfo, failure=_Refusal),
        )

        @router.post(
            "/completions",
            openapi_extra=request_docs(CompletionRequest),
            responses=response_docs(Completion, events=CompletionChunk | ErrorAnswer),
        )
        async def complete(request: Request) -> Response:
            """Complete a prompt."""
            return await completions.answer(request, await read(request, CompletionRequest))

        @router.post(
            "/chat/completions",
            openapi_extra=request_docs(ChatRequest),
            responses=response_docs(ChatCompletion, events=ChatChunk | ErrorAnswer),
        )
        async def converse(request: Request) -> Response:
            """Generate the next message of a conversation."""
            return await chat.answer(request, await read(request, ChatRequest))

        @router.post(
            "/completions/render",
            openapi_extra=request_docs(CompletionRequest),
            responses=response_docs(list[Rendered]),
        )
        async def render_completion(request: Request) -> Response:
            """Render a completion request into engine requests, without running them."""
            return await completions.rendered(request, await read(request, CompletionRequest))

        @router.post(
            "/chat/completions/render",
            openapi_extra=request_docs(ChatRequest),
            responses=response_docs(Rendered),
        )
        async def render_chat(request: Request) -> Response:
            """Render a chat request into an engine request, without running it."""
            return await self._derender.rendered(request, await read(request, ChatRequest))

        @router.post(
            "/chat/completions/batch",
            openapi_extra=request_docs(ChatBatchRequest),
            responses=response_docs(ChatCompletion),
        )
        async def converse_several(request: Request) -> Response:
            """Generate the next message of several conversations, as the choices of one response.

            The choice with index i answers the conversation with index i.
            """
            return await chat.batch(request, await read(request, ChatBatchRequest))

        @without_prefix.post(
            "/generative_scoring",
            openapi_extra=request_docs(ScoringRequest),
            responses=response_docs(ScoringAnswer),
        )
        async def generative_scoring(request: Request) -> Response:
            """Score items by the probability that the model continues with a label."""
            return await score(self.context, request, await read(request, ScoringRequest))

        self._add_tokens(router, without_prefix)
        router.routes.extend(without_prefix.routes)
        return router

    def _add_tokens(self, router: APIRouter, without_prefix: APIRouter) -> None:
        """Add the routes of requests and answers in tokens."""
        derender, generate = self._derender, Generate(self.context)

        @router.post(
            "/chat/completions/derender",
            openapi_extra=request_docs(ChatDerenderRequest),
            responses=response_docs(ChatCompletion | DerenderedChat),
        )
        async def derender_chat(request: Request) -> Response:
            """Convert generated token ids to the response of a chat, or to one of its chunks."""
            return await derender.chat(request, await read(request, ChatDerenderRequest))

        @router.post(
            "/completions/derender",
            openapi_extra=request_docs(CompletionDerenderRequest),
            responses=response_docs(Completion | DerenderedCompletion),
        )
        async def derender_completion(request: Request) -> Response:
            """Convert generated token ids to a completion, or to one of its chunks."""
            return await derender.completion(
                request, await read(request, CompletionDerenderRequest)
            )

        @without_prefix.post(
            "/inference/v1/generate",
            openapi_extra=request_docs(GenerateRequest),
            responses=response_docs(GenerateAnswer, events=GenerateAnswer | ErrorAnswer),
        )
        async def generate_tokens(request: Request) -> Response:
            """Generate token ids from the token ids of a prompt."""
            return await generate.answer(request, await read(request, GenerateRequest))

        @without_prefix.post(
            "/inference/v1/abort_requests",
            openapi_extra=request_docs(AbortRequest),
            response_class=Response,
        )
        async def abort(request: Request) -> Response:
            """End requests by their ids: their answers have finish_reason abort."""
            return await abort_requests(request, await read(request, AbortRequest))

    async def stop(self) -> None:
        await self._chat.stop()
