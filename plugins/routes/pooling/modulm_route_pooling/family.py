"""The route family of pooling models."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from modulm.contracts.pooler import PoolingInputs
from modulm.contracts.sampling import PoolingParams
from modulm.errors import RequestError
from modulm.loading.pooling import open_pooler
from modulm.plugins import current
from modulm_route_pooling import cohere
from modulm_route_pooling.cohere import question, refuse_images
from modulm_route_pooling.io_processing import open_processor
from modulm_route_pooling.objects import (
    Classified,
    ClassList,
    CohereEmbeddings,
    EmbeddingList,
    Head,
    PoolingList,
    Processed,
    Ranked,
    RankList,
    Scored,
    ScoreList,
    Usage,
)
from modulm_route_pooling.prompts import (
    Part,
    Side,
    pairs_of,
    prompts_of,
    shown_document,
    size,
    text_of,
)
from modulm_route_pooling.schema import (
    ClassifyRequest,
    CohereEmbedRequest,
    EmbedRequest,
    PoolRequest,
    RerankRequest,
    ScoreRequest,
)
from modulm_route_pooling.vectors import bytes_response, encode_vector, is_binary
from modulm_server.generation import ServedModel
from modulm_server.json_body import bad_field, json_response, read, request_docs
from modulm_server.media_service import RequestMedia
from modulm_server.openapi import response_docs
from modulm_server.prompts import Prompt
from modulm_server.route import RouteContext, RouteFamily

if TYPE_CHECKING:
    from modulm.contracts.requests import PromptLike

__all__ = ["Pooling"]

_BYTES = "application/octet-stream"
#: Tasks from which scores can be computed.
_PAIRS = ("score", "embed", "token_embed")


class Pooling(RouteFamily):
    """`/v1/embeddings`, `/pooling`, `/classify`, `/score`, `/rerank` and their other paths."""

    name = "pooling"
    api = 2

    def __init__(self, context: RouteContext) -> None:
        super().__init__(context)
        self._processor = open_processor(context.config)

    def router(self) -> APIRouter:
        router = APIRouter(tags=["Pooling"])
        routes = (
            (
                self.embed,
                EmbedRequest,
                response_docs(EmbeddingList, content=_BYTES),
                ("/v1/embeddings",),
            ),
            (
                self.cohere_embed,
                CohereEmbedRequest,
                response_docs(CohereEmbeddings),
                ("/v2/embed",),
            ),
            (
                self.pool,
                PoolRequest,
                response_docs(PoolingList | Processed, content=_BYTES),
                ("/pooling",),
            ),
            (self.classify, ClassifyRequest, response_docs(ClassList), ("/classify",)),
            (self.score, ScoreRequest, response_docs(ScoreList), ("/score", "/v1/score")),
            (
                self.rerank,
                RerankRequest,
                response_docs(RankList),
                ("/rerank", "/v1/rerank", "/v2/rerank"),
            ),
        )
        for function, schema, answers, paths in routes:
            for path in paths:
                router.add_api_route(
                    path,
                    function,
                    methods=["POST"],
                    openapi_extra=request_docs(schema),
                    responses=answers,
                )
        return router

    async def embed(self, request: Request) -> Response:
        """Compute one embedding per text."""
        body = await read(request, EmbedRequest)
        model = await self._model(body.model, ("embed",))
        outputs = await self._embed_all(body, "embed", model)
        return _vectors("embd", "embedding", "embedding", model.name, outputs, body)

    async def cohere_embed(self, request: Request) -> Response:
        """Compute embeddings, in Cohere's form."""
        body = await read(request, CohereEmbedRequest)
        refuse_images(body)
        model = await self._model(body.model, ("embed",))
        info = self.context.engine.info
        embed_request = question(body, info.max_model_len, info.texts.prompts)
        outputs = await self._embed_all(embed_request, "embed", model)
        texts = [text_of("inputs", text) for text in embed_request.input]
        vectors = [np.asarray(output.outputs.data) for output in outputs]
        return json_response(cohere.answer(body, texts, vectors, _usage(outputs)["prompt_tokens"]))

    async def pool(self, request: Request) -> Response:
        """Return the model's raw vectors."""
        body = await read(request, PoolRequest)
        if body.data is not None:
            return await self._processed(body)
        tasks = [task for task in self.context.engine.info.tasks if task != "generate"]
        model = await self._model(
            body.model, (body.task,) if body.task else tuple(tasks) or ("pool",)
        )
        outputs = await self._embed_all(body, body.task or tasks[0], model)
        return _vectors("pool", "pooling", "data", model.name, outputs, body)

    async def _processed(self, body: PoolRequest) -> Response:
        """Answer a request whose `data` goes through the server's IO processor."""
        if self._processor is None:
            raise bad_field("data", "data needs a server with --io-processor-plugin")
        if body.input is not None or body.messages is not None:
            raise bad_field("data", "data takes the place of input and messages: send one of them")
        tasks = [task for task in self.context.engine.info.tasks if task != "generate"]
        model = await self._model(body.model, (body.task,) if body.task else tasks or ("pool",))
        processor = self._processor
        value = await processor.call("parse_data", body.data)
        params = _params(body, task=body.task or tasks[0], dimensions=body.dimensions)
        params = await processor.call("merge_pooling_params", value, params)
        body.input = list(await processor.call("pre_process", value))
        outputs = await self._pooled(body, params, model)
        vectors = [np.asarray(output.outputs.data, dtype=np.float32) for output in outputs]
        answer: Processed = {
            "request_id": body.request_id or f"pool-{uuid4().hex}",
            "created_at": int(time.time()),
            "data": await processor.call("post_process", value, vectors),
        }
        return json_response(answer)

    async def classify(self, request: Request) -> Response:
        """Compute class probabilities."""
        body = await read(request, ClassifyRequest)
        model = await self._model(body.model, ("classify",))
        outputs = await self._pooled(body, _params(body, task="classify"), model)
        data: list[Classified] = []
        for index, output in enumerate(outputs):
            probs = np.asarray(output.outputs.data).ravel()
            best = self._labels.get(str(int(probs.argmax())))
            data.append(
                {
                    "index": index,
                    "label": best,
                    "probs": probs.tolist(),
                    "num_classes": len(probs),
                }
            )
        answer: ClassList = {
            **_head("classify", model.name, body),
            "data": data,
            "usage": _usage(outputs),
        }
        return json_response(answer)

    async def score(self, request: Request) -> Response:
        """Score pairs of texts."""
        body = await read(request, ScoreRequest)
        model = await self._model(body.model, _PAIRS)
        sides = await pairs_of(self.context.generation, self._texts, body)
        scores, usage = await self._scores(*sides, body, model)
        data: list[Scored] = [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(scores)
        ]
        answer: ScoreList = {**_head("score", model.name, body), "data": data, "usage": usage}
        return json_response(answer)

    async def rerank(self, request: Request) -> Response:
        """Rank documents by relevance to a query."""
        body = await read(request, RerankRequest)
        model = await self._model(body.model, _PAIRS)
        sides = await pairs_of(self.context.generation, self._texts, body)
        scores, usage = await self._scores(*sides, body, model)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results: list[Ranked] = [
            {"index": i, "relevance_score": scores[i]} for i in order[: body.top_n or len(order)]
        ]
        if body.return_documents is not False:
            for result in results:
                document = body.documents[result["index"]]
                result["document"] = shown_document(document, body.return_documents is True)
        answer: RankList = {**_head("rerank", model.name, body), "results": results, "usage": usage}
        return json_response(answer)

    # Internals.

    @cached_property
    def _labels(self) -> Mapping[str, str]:
        """The class labels by index, from config.json or --hf-overrides."""
        info = self.context.engine.info
        file = Path(info.path) / "config.json"
        table = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        labels: Mapping[str, str] = {**table, **info.config.model.hf_overrides}.get(
            "id2label"
        ) or {}
        return labels

    @property
    def _texts(self) -> PoolingInputs:
        engine = self.context.engine
        pooler = open_pooler(engine.info.config, current())
        return pooler.inputs(engine.info, engine.tokenizer, self.context.generation.template)

    async def _model(self, name: Any, tasks: Sequence[str]) -> ServedModel:
        """Find the model and check that it supports one of the tasks. Raises ApiError(400)."""
        model: ServedModel = await self.context.generation.find_model(name)
        self.context.generation.check_open()
        offered = self.context.engine.info.tasks
        if not set(tasks) & set(offered):
            raise bad_field(
                "model",
                f"the model does not support {' or '.join(tasks)}, only "
                f"{', '.join(offered)}: serve a pooling model, or this one with --runner pooling",
                "unsupported",
            )
        return model

    async def _embed_all(self, body: EmbedRequest, task: str, model: ServedModel) -> list[Any]:
        wishes = {"dimensions": body.dimensions, "normalize": body.normalize}
        return await self._pooled(body, _params(body, task=task, **wishes), model)

    async def _pooled(
        self, body: EmbedRequest | ClassifyRequest, params: PoolingParams, model: ServedModel
    ) -> list[Any]:
        parts = await prompts_of(self.context.generation, self._texts, body, params)
        return await self._run(parts, body, model)

    async def _run(self, parts: Sequence[Part], body: Any, model: ServedModel) -> list[Any]:
        """Run all prompts concurrently. The first failure cancels the others."""
        encode = partial(
            self.context.generation.encode,
            priority=body.priority or 0,
            adapter=model.adapter,
            cache_salt=body.cache_salt,
        )
        tasks = [asyncio.ensure_future(encode(_prompt(prompt), params)) for prompt, params in parts]
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
        self,
        left: Sequence[Side],
        right: Sequence[Side],
        media: RequestMedia,
        body: ScoreRequest | RerankRequest,
        model: ServedModel,
    ) -> tuple[list[float], Usage]:
        """Score pairs; returns (scores, token usage)."""
        wanted = {"variables": self._variables(body)}
        pairs = self._texts.pairs
        amount = sum(map(size, [*left, *right]))
        generation = self.context.generation
        rendered = self.context.engine.info.texts.template is not None
        work = generation.work.render if rendered else generation.work.run
        job = await work(amount, pairs, left, right, _params(body), **wanted)
        parts = list(job.parts)
        media_indices = [
            index for index, (part, _) in enumerate(parts) if isinstance(part, Mapping)
        ]
        if media_indices:
            mappings = [cast("Mapping[str, Any]", parts[index][0]) for index in media_indices]
            prompts = [
                (mapping["prompt_token_ids"], mapping["multi_modal_data"]) for mapping in mappings
            ]
            for index, prompt in zip(
                media_indices, await generation.with_media(prompts, media), strict=True
            ):
                parts[index] = (prompt, parts[index][1])
        outputs = await self._run(parts, body, model)
        usage = _usage(outputs)
        return [output.outputs.score for output in job.join(outputs)], usage

    def _variables(self, body: ScoreRequest | RerankRequest) -> dict[str, Any] | None:
        """Variables of the template for pairs. Raises ApiError(400) for an instruction without a
        template to put it into.
        """
        if body.instruction is None:
            return body.chat_template_kwargs
        if self.context.engine.info.texts.template is None:
            raise bad_field(
                "instruction", "this model has no template for an instruction: put it into the "
                "text of the query"
            )  # fmt: skip
        return {"instruction": body.instruction, **(body.chat_template_kwargs or {})}


def _params(body: Any, **extra: Any) -> PoolingParams:
    """Build pooling parameters from a body's common fields and a route's own ones."""
    return PoolingParams(
        use_activation=body.use_activation,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        prompt_name=body.prompt_name,
        **extra,
    )


def _vectors(
    prefix: str, noun: str, key: str, model: str, outputs: Sequence[Any], body: EmbedRequest
) -> Response:
    """Build a response of vectors in the requested encoding. key: their field in JSON."""
    head, usage = _head(prefix, model, body), _usage(outputs)
    vectors = [np.asarray(output.outputs.data, dtype=np.float32) for output in outputs]
    if is_binary(body):
        return bytes_response(vectors, body, {**head, "usage": usage})
    data = [
        {"object": noun, "index": index, key: encode_vector(vector, body)}
        for index, vector in enumerate(vectors)
    ]
    return json_response({**head, "data": data, "usage": usage})


def _head(prefix: str, model: str, body: Any) -> Head:
    name = f"{prefix}-{body.request_id or uuid4().hex}"
    return {"id": name, "object": "list", "created": int(time.time()), "model": model}


def _usage(outputs: Sequence[Any]) -> Usage:
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _prompt(prompt: Prompt | PromptLike) -> Prompt:
    """Convert token ids to a prompt."""
    return prompt if isinstance(prompt, Prompt) else Prompt(cast("Sequence[int]", prompt))
