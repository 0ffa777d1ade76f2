"""The ingress of an application: forwards each request to a replica of the model it names.

It has no tokenizer and no engine. Answers of replicas are forwarded as they arrive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from attrs import frozen
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import Request

import modulm
from modulm.errors import EngineDead, ModulmError, ReplicaDied
from modulm_ray_serve.affinity import Route, route
from modulm_ray_serve.pools import fetching_body, prefill_body, without_params
from modulm_ray_serve.replica import Call
from modulm_server.errors import ApiError, describe, error_body, model_error, respond
from modulm_server.json_body import bad_field, json_response

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Front", "Served"]

log = logging.getLogger("modulm_server")

#: Routes that any replica can answer; others depend on the memory or disk of one process.
_FORWARDED = frozenset(
    {
        "/v1/chat/completions", "/v1/chat/completions/render", "/v1/completions",
        "/v1/completions/render", "/v1/embeddings", "/v1/responses", "/v1/responses/input_tokens",
        "/v1/messages", "/v1/messages/count_tokens", "/v1/audio/transcriptions",
        "/v1/audio/translations", "/v1/score", "/v1/rerank", "/v2/rerank", "/v2/embed", "/score",
        "/rerank", "/classify", "/pooling", "/tokenize", "/detokenize", "/api/chat",
        "/api/generate", "/api/embed", "/api/embeddings", "/api/show",
    }
)  # fmt: skip
#: Fields of a body that refer to state of one replica.
_STATEFUL_FIELDS = ("previous_response_id", "conversation", "background")
#: Keys of the ASGI scope that are sent to a replica; their values are plain.
_PLAIN = ("type", "http_version", "method", "scheme", "query_string", "headers", "client", "server")
#: Replicas that may die during a request before it fails.
_DEATHS = 3
#: Seconds in which a replica of a model must answer a health check.
_HEALTH_TIMEOUT = 2.0
#: Seconds after which a decode replica computes a prompt that a prefill replica has not.
_PREFILL_TIMEOUT = 120.0


@frozen
class Served:
    """A model of the application.

    names: its names, of which the first is shown. adapters: name -> folder. keys: number of API
    keys. apart: whether each key has a separate prefix cache. limit: maximum bytes of a body.
    prefill_from: tokens of prompts that prefill replicas compute; 0: there are none.
    """

    names: tuple[str, ...]
    adapters: Mapping[str, str]
    keys: int
    apart: bool
    limit: int
    prefill_from: int = 0


class Front:
    """The ingress.

    served, handles: the models and the handles of their replicas, in one order; then those of
    prefill replicas, of models that have some.
    """

    def __init__(self, served: Sequence[Served], *handles: DeploymentHandle) -> None:
        count = len(served)
        self._models = list(zip(served, map(_streaming, handles[:count]), strict=True))
        pooled = [index for index, each in enumerate(served) if each.prefill_from]
        self._plain, prefills = handles, handles[count:]
        #: Index of a model -> the handles of its prefill replicas, for streams and other calls.
        self._prefills = {
            index: (_streaming(handle), handle)
            for index, handle in zip(pooled, prefills, strict=True)
        }
        self._limit = max(each.limit for each in served)
        self._by_name = {
            name: index
            for index, each in enumerate(served)
            for name in (*each.names, *each.adapters)
        }
        if not all(each.keys for each in served):
            log.warning(
                "no API key is required: anyone who reaches Ray Serve's address can use the models"
            )

    def __serve_build_asgi_app__(self) -> ASGIApp:
        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            await self._answer(scope, receive, send)

        return application  # uvicorn takes a bound method for an ASGI 2 application

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _answer_lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        started = _Started(send)
        try:
            await self._serve(_path(scope), scope, receive, started)
        except Exception as error:
            described = describe(_as_own_error(error), "")
            if described.status >= 500:
                log.error("%s failed: %s: %s", scope["path"], type(error).__name__, error)
            if not started.has_started:
                await respond(described)(scope, receive, send)
            elif started.events:
                data = b"data: " + msgspec.json.encode(error_body(described)) + b"\n\n"
                await send({"type": "http.response.body", "body": data, "more_body": False})
            else:
                raise

    async def _serve(self, path: str, scope: Scope, receive: Receive, send: _Started) -> None:
        if path in _FORWARDED and scope["method"] == "POST":
            await self._forward_request(path, scope, receive, send)
            return
        if path == "/collective_rpc" and scope["method"] == "POST":
            await (await self._call_workers(path, scope, receive))(scope, receive, send)
            return
        if scope["method"] not in ("GET", "HEAD"):
            raise ApiError(404, f"{scope['method']} {path} is not served behind Ray Serve")
        if path in ("/health", "/ping", "/ready"):
            response = await self._health()
        elif path == "/version":
            response = json_response({"version": modulm.__version__})
        elif path == "/v1/models" or path.startswith("/v1/models/"):
            response = await self._list_models(scope, path.removeprefix("/v1/models").strip("/"))
        else:
            raise ApiError(404, f"GET {path} is not served behind Ray Serve")
        await response(scope, receive, send)

    # Requests for a model.

    async def _forward_request(
        self, path: str, scope: Scope, receive: Receive, send: _Started
    ) -> None:
        body = await self._body(receive)
        members = await _fields(scope, body)
        stateful = next((name for name in _STATEFUL_FIELDS if members.get(name)), None)
        if stateful is not None and path.startswith("/v1/responses"):
            raise bad_field(stateful, f"{stateful}: responses are not kept behind Ray Serve")
        name, index = self._model_index(members)
        served, handle = self._models[index]
        adapter = name if name in served.adapters else None
        tenant = dict(scope["headers"]).get(b"authorization", b"") if served.apart else b""
        sent_by = route(members, adapter, tenant)
        if adapter is not None:
            handle = handle.options(multiplexed_model_id=adapter)
        watch = asyncio.ensure_future(_wait_for_disconnect(receive))

        async def forward() -> None:
            last = body
            if index in self._prefills and adapter is None:
                last = await self._compute_prompt(index, path, scope, members, body, tenant)
            await _forward(handle, _call(scope, path, last), sent_by, send)

        task = asyncio.ensure_future(forward())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
        finally:
            watch.cancel()
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
            sent_by.finish()

    async def _compute_prompt(
        self,
        index: int,
        path: str,
        scope: Scope,
        members: Mapping[str, Any],
        body: bytes,
        tenant: bytes,
    ) -> bytes:
        """Let a prefill replica compute a prompt; return the body for a decode replica.

        The decode replica computes what is short, and what no prefill replica has computed.
        """
        if not members or _is_form(scope):
            return body
        own = without_params(members)
        if own != members:
            body = msgspec.json.encode(own)
        sent_by = route(own, None, tenant)
        long = sent_by.tokens >= self._models[index][0].prefill_from
        prefix = prefill_body(path, own) if long else None
        if prefix is None:
            return body
        call = _call(scope, path, prefix)
        try:
            answering = _collect(self._prefills[index][0], call, sent_by)
            status, answer = await asyncio.wait_for(answering, _PREFILL_TIMEOUT)
        except Exception as error:
            sent_by.mark_dead()
            log.warning("a prefill failed, so a decode replica does it: %s", _cause(error))
            return body
        finally:
            sent_by.finish()
        # A request that is refused is refused again, by the replica whose answer is forwarded.
        return (fetching_body(own, answer) if status == 200 else None) or body

    def _model_index(self, members: Mapping[str, Any]) -> tuple[Any, int]:
        """The name of the model that a body asks for, and its index. Raises ApiError."""
        name = members.get("model")
        index = self._by_name.get(name) if isinstance(name, str) else None
        if index is None:
            if isinstance(name, str) and name:
                raise model_error(name)
            if len(self._models) > 1 and members:
                raise bad_field("model", f"model: one of {', '.join(sorted(self._by_name))}")
            index = 0
        return name, index

    async def _body(self, receive: Receive) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the body is incomplete")
            body += message.get("body", b"")
            if len(body) > self._limit:
                raise ApiError(413, f"the body has more than {self._limit} bytes")
            if not message.get("more_body"):
                return bytes(body)

    async def _call_workers(self, path: str, scope: Scope, receive: Receive) -> Any:
        """Call the workers of all replicas of a model; results are grouped by replica."""
        body = await self._body(receive)
        _, index = self._model_index(await _fields(scope, body))
        handles: list[Any] = [self._plain[index]]
        if index in self._prefills:
            handles.append(self._prefills[index][1])
        if not all(hasattr(handle, "broadcast") for handle in handles):
            raise ApiError(501, "this version of Ray Serve cannot call all replicas of a model")
        calls = [handle.broadcast("answer", _call(scope, path, body)) for handle in handles]
        results = [each for call in calls for each in await _results(call)]
        answers = [(status, msgspec.json.decode(data)) for status, data in results]
        for status, answer in answers:
            if status != 200:
                return json_response(answer, status)
        return json_response({"results": [each for _, a in answers for each in a["results"]]})

    # Requests to all models.

    async def _health(self) -> Any:
        states = await asyncio.gather(*(_state(handle) for handle in self._plain))
        alive = states.count("ok")
        status = "ok" if alive == len(states) else "degraded" if alive else "dead"
        names = [model.names[0] for model, _ in self._models]
        names += [f"{names[index]}-prefill" for index in self._prefills]
        each = dict(zip(names, states, strict=True))
        return json_response({"status": status, "models": each}, 200 if alive else 503)

    async def _list_models(self, scope: Scope, name: str) -> Any:
        """All models and adapters, or one, in the format of the replicas' own route."""
        listed = {**scope, "query_string": b""}
        calls = (_collect(handle, _call(listed, "/v1/models")) for _, handle in self._models)
        answers = await asyncio.gather(*calls)
        cards: list[dict[str, Any]] = []
        for (served, _), (status, body) in zip(self._models, answers, strict=True):
            listing = msgspec.json.decode(body)
            if status != 200:
                return json_response(listing, status)
            model_cards = [card for card in listing["data"] if card["id"] not in served.adapters]
            cards += model_cards
            cards += [_adapter_card(model_cards[0], adapter) for adapter in served.adapters]
        if name:
            matching = next((card for card in cards if card["id"] == name), None)
            if matching is None:
                raise model_error(name)
            return json_response(matching)
        if any(key == b"anthropic-version" for key, _ in scope["headers"]):
            ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}
            return json_response({"data": cards, **ends})
        return json_response({"object": "list", "data": cards})


class _Started:
    """Sends messages and records whether an answer has started, and whether it is a stream."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_started = False
        self.events = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            self.has_started, self.events = True, kind.startswith(b"text/event-stream")
        await self._send(message)


async def _forward(handle: DeploymentHandle, call: Call, sent_by: Route, send: _Started) -> None:
    """Forward a request; retry on another replica if one dies before it has answered."""
    for deaths in range(_DEATHS):
        answer = handle.ask.remote(call, sent_by)
        try:
            async for messages in answer:
                sent_by.mark_answering()
                for message in messages:
                    await send(message)
            return
        except (RayActorError, EngineDead) as error:
            sent_by.mark_dead()
            if send.has_started or deaths + 1 == _DEATHS:
                raise ReplicaDied(f"its replica is gone: {_cause(error)}") from error
            log.warning("a replica is gone; restarting the request: %s", _cause(error))
        except BaseException:
            answer.cancel()
            raise


async def _collect(
    handle: DeploymentHandle, call: Call, sent_by: Route | None = None
) -> tuple[int, bytes]:
    """(status, body) of a short answer."""
    status, body = 500, b""
    answer = handle.ask.remote(call, sent_by)
    try:
        async for messages in answer:
            for message in messages:
                status = message.get("status", status)
                body += message.get("body", b"")
    except BaseException:
        answer.cancel()
        raise
    return status, body


async def _results(calls: Any) -> list[tuple[int, bytes]]:
    """The answers to a broadcast."""
    results: list[tuple[int, bytes]] = await calls.results_async()
    if not results:
        raise ReplicaDied("the model has no running replica")
    return results


async def _state(handle: DeploymentHandle) -> str:
    """The state of a model: ok, starting (no replica answers) or dead."""
    call = handle.health.remote()

    async def wait() -> None:
        await call

    try:
        await asyncio.wait_for(wait(), _HEALTH_TIMEOUT)
    except TimeoutError:
        call.cancel()
        return "starting"
    except Exception:
        return "dead"
    return "ok"


def _streaming(handle: DeploymentHandle) -> DeploymentHandle:
    return handle.options(stream=True)


def _cause(error: BaseException) -> str:
    return str(getattr(error, "cause", error)).splitlines()[0]


def _as_own_error(error: Exception) -> Exception:
    """The error that corresponds to one of Ray Serve."""
    if isinstance(error, BackPressureError):
        return ApiError(
            503, "too many requests are waiting", code="overloaded", headers={"Retry-After": "1"}
        )
    if isinstance(error, DeploymentUnavailableError | TaskCancelledError):
        return ReplicaDied("the model's replicas are gone")
    if isinstance(error, RayTaskError) and isinstance(error.cause, ModulmError):
        return error.cause
    return error


def _path(scope: Scope) -> str:
    """The path without the application's prefix."""
    root = scope.get("root_path", "").rstrip("/")
    path: str = scope["path"]
    return path.removeprefix(root) if root else path


def _call(scope: Scope, path: str, body: bytes = b"") -> Call:
    plain = {name: scope[name] for name in _PLAIN if name in scope}
    plain["headers"] = [
        (name, str(len(body)).encode() if name == b"content-length" and body else value)
        for name, value in scope.get("headers", ())
    ]
    return Call(
        {**plain, "asgi": {"version": "3.0"}, "path": path, "raw_path": path.encode(),
         "root_path": ""}, body,
    )  # fmt: skip


def _is_form(scope: Scope) -> bool:
    kind: bytes = dict(scope["headers"]).get(b"content-type", b"")
    return kind.startswith(b"multipart/form-data")


async def _fields(scope: Scope, body: bytes) -> dict[str, Any]:
    """The fields of a body, or the text fields of a form. Empty if it cannot be parsed; the replica
    then reports the error.
    """
    if _is_form(scope):

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        with suppress(Exception):
            async with Request(dict(scope), receive).form() as form:
                return {name: value for name, value in form.items() if isinstance(value, str)}
        return {}
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        members = msgspec.json.decode(body)
        if isinstance(members, dict):
            return members
    return {}


def _adapter_card(card: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The card of an adapter, made from its model's."""
    changed: dict[str, Any] = {**card, "id": name}
    if "display_name" in card:
        return {**changed, "display_name": name}
    return {**changed, "root": name, "parent": card["id"]}


async def _wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer_lifespan(receive: Receive, send: Send) -> None:
    """Answer lifespan events; the ingress has nothing to start or stop."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
