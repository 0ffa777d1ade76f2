"""The route family."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve
from fastapi import APIRouter, Request
from starlette.responses import Response

from modulm.contracts.route import RouteFamily
from modulm.contracts.sampling import PoolingParams
from modulm.engine.pairs import pair
from modulm.errors import RequestError
from modulm.server.desk import ChatOptions, Prompt
from modulm.server.sampling import LIMITS
from modulm.server.sse import until_gone
from modulm.server.wire import bad_field, json_response, read, takes
from modulm_route_pooling.schema import (
    ClassifyRequest,
    EmbedRequest,
    PoolRequest,
    RerankRequest,
    ScoreRequest,
)

__all__ = ["Pooling"]


class Pooling(RouteFamily):
    """`/v1/embeddings`, `/pooling`, `/classify`, `/score`, `/rerank` and their other paths."""

    name = "pooling"
    api = 1

    def router(self) -> APIRouter:
        router = APIRouter(tags=["Pooling"])
        router.add_api_route(
            "/v1/embeddings", self.embed, methods=["POST"], openapi_extra=takes(EmbedRequest)
        )
        router.add_api_route(
            "/pooling", self.pool, methods=["POST"], openapi_extra=takes(PoolRequest)
        )
        router.add_api_route(
            "/classify", self.classify, methods=["POST"], openapi_extra=takes(ClassifyRequest)
        )
        for path in ("/score", "/v1/score"):
            router.add_api_route(
                path, self.score, methods=["POST"], openapi_extra=takes(ScoreRequest)
            )
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            router.add_api_route(
                path, self.rerank, methods=["POST"], openapi_extra=takes(RerankRequest)
            )
        return router

    async def embed(self, request: Request) -> Response:
        """One vector per text."""
        body = await read(request, EmbedRequest)
        model = self._model(body.model, ("embed",))
        prompts = await self._prompts(body)
        params = PoolingParams(
            task="embed",
            dimensions=body.dimensions,
            normalize=body.normalize,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
        )
        outputs = await until_gone(self._run(prompts, params), request.receive)
        data = [
            {"object": "embedding", "index": index, "embedding": _shown(output, body)}
            for index, output in enumerate(outputs)
        ]
        return json_response({**_head("embd", model), "data": data, "usage": _usage(outputs)})

    async def pool(self, request: Request) -> Response:
        """The model's vectors as they are."""
        body = await read(request, PoolRequest)
        tasks = [task for task in self.context.engine.info.tasks if task != "generate"]
        model = self._model(body.model, (body.task,) if body.task else tuple(tasks) or ("pool",))
        params = PoolingParams(
            task=body.task or tasks[0],
            dimensions=body.dimensions,
            normalize=body.normalize,
            use_activation=body.use_activation,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
        )
        outputs = await until_gone(self._run(await self._prompts(body), params), request.receive)
        data = [
            {"object": "pooling", "index": index, "data": _shown(output, body)}
            for index, output in enumerate(outputs)
        ]
        return json_response({**_head("pool", model), "data": data, "usage": _usage(outputs)})

    async def classify(self, request: Request) -> Response:
        """The probability of each class."""
        body = await read(request, ClassifyRequest)
        model = self._model(body.model, ("classify",))
        params = PoolingParams(
            task="classify",
            use_activation=body.use_activation,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
        )
        outputs = await until_gone(self._run(await self._prompts(body), params), request.receive)
        data = []
        for index, output in enumerate(outputs):
            probs = np.asarray(output.outputs.data).ravel()
            best = self._labels.get(str(int(probs.argmax())))
            shown = {"probs": probs.tolist(), "num_classes": len(probs)}
            data.append({"index": index, "label": best, **shown})
        return json_response({**_head("classify", model), "data": data, "usage": _usage(outputs)})

    async def score(self, request: Request) -> Response:
        """How well texts go together."""
        body = await read(request, ScoreRequest)
        model = self._model(body.model, ("score", "embed"))
        left, right = _pairs(body)
        scores, outputs = await until_gone(self._scores(left, right, body), request.receive)
        data = [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(scores)
        ]
        return json_response({**_head("score", model), "data": data, "usage": _usage(outputs)})

    async def rerank(self, request: Request) -> Response:
        """Documents, the best for a query first."""
        body = await read(request, RerankRequest)
        model = self._model(body.model, ("score", "embed"))
        documents = [_document(index, given) for index, given in enumerate(body.documents)]
        scores, outputs = await until_gone(
            self._scores([body.query] * len(documents), documents, body), request.receive
        )
        order = sorted(range(len(scores)), key=lambda place: -scores[place])
        results = [
            {"index": i, "relevance_score": scores[i], "document": {"text": documents[i]}}
            for i in order[: body.top_n or len(order)]
        ]
        if body.return_documents is False:
            for result in results:
                del result["document"]
        head = _head("rerank", model)
        return json_response({**head, "results": results, "usage": _usage(outputs)})

    # How it is done.

    @cached_property
    def _labels(self) -> Mapping[str, str]:
        """The names of the classes by their numbers, as config.json has them."""
        file = Path(self.context.engine.info.path) / "config.json"
        table = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        named: Mapping[str, str] = table.get("id2label") or {}
        return named

    def _model(self, name: Any, tasks: Sequence[str]) -> str:
        """The served model, if it is for one of the tasks. Raises ApiError(400) naming `model`."""
        model: str = self.context.desk.model(name)
        self.context.desk.check_open()
        offered = self.context.engine.info.tasks
        if not set(tasks) & set(offered):
            raise bad_field(
                "model",
                f"{model} is served for {', '.join(offered)}, not for {' or '.join(tasks)}: "
                "start a pooling model, or this one with --runner pooling",
                "unsupported",
            )
        return model

    async def _prompts(self, body: EmbedRequest | ClassifyRequest) -> list[Prompt]:
        special = body.add_special_tokens is not False
        messages = body.messages if isinstance(body, EmbedRequest) else None
        if messages is not None:
            options = ChatOptions(add_generation_prompt=False)
            return [await self.context.desk.from_messages(messages, options)]
        given = body.input
        many = given if isinstance(given, list) and not _is_ids(given) else [given]
        if not 0 < len(many) <= LIMITS.prompts:
            raise bad_field("input", f"input: 1 to {LIMITS.prompts} texts")
        if not all(isinstance(one, str) or _is_ids(one) for one in many):
            raise bad_field("input", "input: text, a list of token ids, or a list of either")
        return [
            await self.context.desk.tokenize(one, special)
            if isinstance(one, str)
            else Prompt(tuple(one))
            for one in many
        ]

    async def _run(
        self, prompts: Sequence[Prompt], params: PoolingParams | Sequence[PoolingParams]
    ) -> list[Any]:
        """All prompts at once; the first failure ends the others."""
        each = [params] * len(prompts) if isinstance(params, PoolingParams) else params
        encode = self.context.desk.encode
        tasks = [
            asyncio.ensure_future(encode(prompt, own))
            for prompt, own in zip(prompts, each, strict=True)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        except RequestError as error:
            error.param = {"prompt": "input"}.get(error.param or "", error.param)
            raise
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def _scores(
        self, left: Sequence[str], right: Sequence[str], body: ScoreRequest | RerankRequest
    ) -> tuple[list[float], list[Any]]:
        """One score per pair: the model's own, else the cosine of two embeddings."""
        desk = self.context.desk
        if "score" in self.context.engine.info.tasks:
            params = PoolingParams(
                task="score",
                use_activation=body.use_activation,
                truncate_prompt_tokens=body.truncate_prompt_tokens,
            )
            pairs = [pair(desk.tokenizer, a, b) for a, b in zip(left, right, strict=True)]
            outputs = await self._run(
                [Prompt(tuple(ids)) for ids, _ in pairs],
                [evolve(params, second_text=start) for _, start in pairs],
            )
            return [float(np.asarray(o.outputs.data).ravel()[0]) for o in outputs], outputs
        params = PoolingParams(
            task="embed", normalize=True, truncate_prompt_tokens=body.truncate_prompt_tokens
        )
        distinct = list(dict.fromkeys([*left, *right]))
        outputs = await self._run([await desk.tokenize(text) for text in distinct], params)
        vectors = {
            text: _unit(output.outputs.data) for text, output in zip(distinct, outputs, strict=True)
        }
        pairs_of = zip(left, right, strict=True)
        return [float(vectors[a] @ vectors[b]) for a, b in pairs_of], outputs


def _unit(vector: Any) -> Any:
    flat = np.asarray(vector, dtype=np.float64).ravel()
    return flat / max(float(np.linalg.norm(flat)), 1e-12)


def _pairs(body: ScoreRequest) -> tuple[list[str], list[str]]:
    left = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    right = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    for name, texts in (("text_1", left), ("text_2", right)):
        if not 0 < len(texts) <= LIMITS.prompts:
            raise bad_field(name, f"{name}: 1 to {LIMITS.prompts} texts")
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise bad_field("text_2", f"text_2: {len(left)} texts are needed, one for each of text_1")
    return left, right


def _document(index: int, given: Any) -> str:
    text = given.get("text") if isinstance(given, dict) else given
    if not isinstance(text, str):
        raise bad_field("documents", f"documents[{index}]: text, or an object with text")
    return text


def _shown(output: Any, body: EmbedRequest) -> Any:
    """A vector as numbers, or as the base64 of its 32-bit floats."""
    data = np.asarray(output.outputs.data, dtype="<f4")
    if body.encoding_format == "base64":
        return base64.b64encode(data.tobytes()).decode()
    return data.tolist()


def _head(prefix: str, model: str) -> dict[str, Any]:
    created = int(time.time())
    return {"id": f"{prefix}-{created}", "object": "list", "created": created, "model": model}


def _usage(outputs: Sequence[Any]) -> dict[str, int]:
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    )
