"""Passes requests on to the models that they name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import msgspec
from attrs import define

from modulm_server.errors import ApiError, ClientGone, report, shutting_down
from modulm_server.json_body import bad_field
from modulm_server.models.flags import parse_duration
from modulm_server.models.request_fields import Replay, RequestFields, read_body, read_fields

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from modulm_server.directory import ModelDirectory
    from modulm_server.models.hosted_model import HostedModel
    from modulm_server.models.pool import ModelPool
    from modulm_server.route import RouteFamily

__all__ = ["Dispatched", "Dispatcher"]

_COMMENT = b": loading the model\n\n"
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
#: Code of a WebSocket that is closed: try again later.
_LATER, _REFUSED = 1013, 1008


class Dispatcher:
    """Makes an application the front end of a pool of models: its `ModelHost`."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool
        self.directory: ModelDirectory = pool
        self.stores: MutableMapping[str, Any] = pool.stores
        self.loopback = pool.loopback

    def dispatched(self, family: RouteFamily, path: str, app: ASGIApp) -> ASGIApp:
        """See `ModelHost`."""
        return Dispatched(self._pool, family, path, app)


@define(eq=False)
class Dispatched:
    """The endpoint of one route: the model that a request names answers it.

    The model is the body's `model`, else that of the query, else the first one that the request's
    key may use. path: as declared by the route. front: the front end's own endpoint.
    """

    pool: ModelPool
    family: RouteFamily
    path: str
    front: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held: HostedModel | None = scope.get("modulm.model")
        if held is not None:  # the request of another route, which has made sure that it is loaded
            await self._endpoint(held, scope)(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._open(scope, receive, send)
        else:
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields: RequestFields | None = RequestFields()
        if scope["method"] not in ("GET", "HEAD"):
            body = await read_body(receive)
            receive = Replay(body, receive)
            fields = await read_fields(scope, body)
        if fields is None:
            await self.front(scope, receive, send)
            return
        stream = _Stream(self.family, send)
        try:
            model = await self._find(scope, fields)
            if self.path in self.family.cold_paths and not model.ready:
                await self.front(scope, receive, send)
                return
            keep_alive = _keep_alive(model, fields)
            if not model.ready:
                begin = stream.comment if fields.stream is True and stream.possible else None
                await self.pool.until_ready(model, begin)
            endpoint = self._endpoint(model, scope)
        except ClientGone:
            raise
        except Exception as error:
            await stream.fail(scope, receive, report(error, scope))
            return
        await self._run(model, keep_alive, endpoint, scope, receive, stream)

    async def _run(
        self,
        model: HostedModel,
        keep_alive: float | None,
        endpoint: ASGIApp,
        scope: Scope,
        receive: Receive,
        stream: _Stream,
    ) -> None:
        """Let a model answer. No other task has run since it was ready."""
        scope["modulm.model"] = model
        model.in_flight += 1
        try:
            await endpoint(scope, receive, stream.give if stream.begun else stream.send)
        finally:
            model.release(keep_alive)
            if keep_alive is not None:
                self.pool.touched()

    async def _find(self, scope: Scope, fields: RequestFields) -> HostedModel:
        name = fields.model
        if not isinstance(name, str) and scope["query_string"]:
            name = parse_qs(scope["query_string"].decode("latin-1")).get("model", [None])[0]
        if self.pool.closing:
            raise shutting_down()
        owner = scope.get("modulm.owner", "")
        try:
            return self.pool.find(name, owner)
        except ApiError:
            if not await self.pool.discover():
                raise
            return self.pool.find(name, owner)

    def _endpoint(self, model: HostedModel, scope: Scope) -> ASGIApp:
        """The model's own endpoint of this route. Raises ApiError(404)."""
        key = scope.get("method", ""), self.path
        endpoint = None if model.routes is None else model.routes.endpoints.get(key)
        if endpoint is None:
            raise ApiError(404, f"model {model.name!r} does not serve {self.path}", param="model")
        return endpoint

    async def _open(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a model serve a WebSocket."""
        try:
            model = await self._find(scope, RequestFields())
            await self.pool.until_ready(model)
            endpoint = self._endpoint(model, scope)
        except Exception as error:
            status = report(error, scope).status
            await receive()
            await send({"type": "websocket.close", "code": _LATER if status >= 429 else _REFUSED})
            return
        stream = _Stream(self.family, send)
        await self._run(model, model.settings.keep_alive, endpoint, scope, receive, stream)


def _keep_alive(model: HostedModel, fields: RequestFields) -> float | None:
    """Seconds that the model stays loaded after the request. Raises ApiError(400)."""
    if fields.keep_alive is msgspec.UNSET or fields.keep_alive is None:
        return model.settings.keep_alive
    try:
        return parse_duration(fields.keep_alive)
    except ValueError as error:
        raise bad_field("keep_alive", f"keep_alive: {error}") from error


class _Stream:
    """The response to a request that may wait for its model.

    An event stream begins early, with comments; the model's own response then continues it, and an
    error becomes its last event.
    """

    def __init__(self, family: RouteFamily, send: Send) -> None:
        self._family = family
        self.send = send
        self.begun = False
        self._status = 200
        self._error = bytearray()

    @property
    def possible(self) -> bool:
        """Whether the streams of this API are event streams."""
        return self._family.error_frames(b"{}") is not None

    async def comment(self) -> None:
        """Send a comment."""
        if not self.begun:
            self.begun = True
            await self.send(
                {"type": "http.response.start", "status": 200, "headers": list(_EVENT_STREAM)}
            )
        await self.send({"type": "http.response.body", "body": _COMMENT, "more_body": True})

    async def give(self, message: Message) -> None:
        """Continue the stream with the model's response."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            return
        if self._status == 200:
            await self.send(message)
            return
        self._error += message.get("body", b"")
        if not message.get("more_body", False):
            await self._end(bytes(self._error))

    async def fail(self, scope: Scope, receive: Receive, error: ApiError) -> None:
        """Respond with an error in the API's form."""
        response = self._family.error_response(error)
        if self.begun:
            await self._end(bytes(response.body))
        else:
            await response(scope, receive, self.send)

    async def _end(self, body: bytes) -> None:
        frames: Any = self._family.error_frames(body)
        await self.send({"type": "http.response.body", "body": frames, "more_body": False})
