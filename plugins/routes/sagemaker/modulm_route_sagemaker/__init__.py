"""Amazon SageMaker's `/invocations`: forwards requests to the route for their fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from modulm_server.json_body import bad_field, body_of, read, request_docs
from modulm_server.openapi import response_docs
from modulm_server.route import RouteFamily

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["SageMaker"]

#: Fields that a request must have -> the route that handles it.
_ROUTES = (
    (("messages",), "/v1/chat/completions"),
    (("prompt",), "/v1/completions"),
    (("query", "documents"), "/rerank"),
    (("text_1", "text_2"), "/score"),
    (("input",), "/v1/embeddings"),
)


class Invocation(msgspec.Struct):
    """The fields that tell requests apart; the route that handles a request reads the others."""

    messages: Any = msgspec.UNSET
    prompt: Any = msgspec.UNSET
    query: Any = msgspec.UNSET
    documents: Any = msgspec.UNSET
    text_1: Any = msgspec.UNSET
    text_2: Any = msgspec.UNSET
    input: Any = msgspec.UNSET


class SageMaker(RouteFamily):
    """`POST /invocations`. SageMaker's `/ping` belongs to the routes for operators."""

    name = "sagemaker"
    api = 2

    def router(self) -> APIRouter:
        router = APIRouter(tags=["SageMaker"])
        router.add_api_route(
            "/invocations",
            self.invoke,
            methods=["POST"],
            response_class=Response,
            openapi_extra=request_docs(Invocation),
            responses=response_docs(dict[str, Any], events=dict[str, Any]),
        )
        return router

    async def invoke(self, request: Request) -> Response:
        """Answer a chat, completion, embedding, score or rerank request, streamed or whole.

        A model that classifies but has no embeddings answers `input` with classes.
        """
        path = self._path_for(await read(request, Invocation))
        return _Forwarded(request.app.router, path, await body_of(request))

    def _path_for(self, body: Invocation) -> str:
        for fields, path in _ROUTES:
            if all(getattr(body, name) is not msgspec.UNSET for name in fields):
                tasks = self.context.engine.info.tasks
                classifies = "classify" in tasks and "embed" not in tasks
                return "/classify" if path == "/v1/embeddings" and classifies else path
        known = "; ".join(" and ".join(fields) for fields, _ in _ROUTES)
        raise bad_field(None, f"the body must have the fields of a request: {known}")


class _Forwarded(Response):
    """The response of another route to the same body."""

    def __init__(self, router: ASGIApp, path: str, content: bytes) -> None:
        super().__init__()
        self._router = router
        self._path = path
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = False

        async def replay() -> Message:
            nonlocal read
            if read:
                return await receive()
            read = True
            return {"type": "http.request", "body": self._content, "more_body": False}

        forwarded = {**scope, "path": self._path, "raw_path": self._path.encode()}
        await self._router(forwarded, replay, send)
