"""The service `vllm.grpc.engine.VllmEngine`: what `vllm serve --grpc` serves to SMG's router."""

from __future__ import annotations

import asyncio
import hashlib
import io
import time
import zipfile
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import msgspec
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2 as common

import modulm
from modulm.loading.sources import tokenizer_path
from modulm_route_grpc.http_calls import Call, CallFailed, HttpCalls
from modulm_route_grpc.inference import (
    check_entries,
    invalid,
    json_object,
    media_part,
    structured_outputs,
)

if TYPE_CHECKING:
    from modulm_server.route import RouteContext

__all__ = ["VllmEngine"]

#: Files that a tokenizer is built from, and bytes of one message of them.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "tekken.json", "chat_template.jinja",
    "chat_template.json", "generation_config.json", "config.json",
)  # fmt: skip
_CHUNK = 1 << 20
#: Names in content parts.
_MODALITIES = {common.IMAGE: "image", common.AUDIO: "audio", common.VIDEO: "video"}


class VllmEngine:
    """Answers through the HTTP routes; facts about the engine come from the engine itself."""

    def __init__(self, context: RouteContext, calls: HttpCalls) -> None:
        self._context = context
        self._calls = calls
        self._began = time.time()
        self._latest = self._began
        self._archive: asyncio.Future[tuple[bytes, str]] | None = None

    async def Generate(self, request: Any, call: Call) -> AsyncIterator[Any]:  # noqa: N802
        """Answer a request in tokens: chunks if it streams, and one completion per choice."""
        self._latest = time.time()
        body = await self._body(request, call)
        name, path = request.request_id, "/inference/v1/generate"
        logprobs = _count(request.sampling_params, "logprobs")
        if not request.stream:
            responses = await self._calls.call(
                call, "POST", path, body, request_id=name,
                read=lambda answer: [
                    _complete(choice, answer, len(choice["token_ids"]), logprobs)
                    for choice in answer["choices"]
                ],
            )  # fmt: skip
            for response in responses:
                yield response
            return
        body |= {"stream": True, "stream_options": {"continuous_usage_stats": True}}
        totals: dict[int, int] = {}
        async for responses in self._calls.stream(
            call, path, body, request_id=name,
            read=lambda event: list(_chunks(event, totals, logprobs)),
        ):  # fmt: skip
            for response in responses:
                yield response

    async def _body(self, request: Any, call: Call) -> dict[str, Any]:
        for field in ("kv_transfer_params", "data_parallel_rank"):
            if request.HasField(field):
                raise invalid(field, "is not supported: leave it out")
        if request.HasField("mm_inputs") or request.extra_mm_inputs:
            raise invalid("mm_inputs", "is not supported: send media_refs, which this server reads")
        kind = request.WhichOneof("input")
        if request.media_refs.items and kind == "text":
            raise invalid("media_refs", "need tokenized input")
        if kind is None:
            raise invalid("input", "is missing: send tokenized or text")
        if kind == "text":
            tokens = await self._calls.call(call, "POST", "/tokenize", {"prompt": request.text})
            ids = tokens["tokens"]
        else:
            ids = await self._ids(request.tokenized, call)
        body = {
            "token_ids": ids,
            "sampling_params": await call.convert(_sampling, request.sampling_params),
            "return_token_ids": True,
        }
        if request.media_refs.items:
            body["content_parts"] = await call.convert(_media_parts, request.media_refs.items)
        if request.request_id:
            body["request_id"] = request.request_id
        if request.HasField("kv_transfer_params_json"):
            text = request.kv_transfer_params_json.encode()
            body["kv_transfer_params"] = await call.convert(
                json_object, text, "kv_transfer_params_json"
            )
        return body

    async def _ids(self, tokenized: Any, call: Call) -> list[int]:
        """The tokens of a prompt. Raises CallFailed."""
        given, most = len(tokenized.input_ids), self._context.engine.info.max_model_len
        if 0 < most < given:  # 0: of several models
            raise invalid("tokenized", f"has {given} tokens, the context {most}")
        return await call.convert(list, tokenized.input_ids)

    async def Embed(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Embed a prompt of token ids."""
        if not request.HasField("tokenized"):
            raise invalid("tokenized", "is missing")
        ids = await self._ids(request.tokenized, call)
        body = {"input": [ids], "encoding_format": "float"}
        answer = await self._calls.call(
            call, "POST", "/v1/embeddings", body, request_id=request.request_id
        )
        vector = answer["data"][0]["embedding"]
        return pb.EmbedResponse(
            embedding=vector,
            prompt_tokens=answer["usage"]["prompt_tokens"],
            embedding_dim=len(vector),
        )

    async def HealthCheck(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Whether the engine works. Needs no key, as /health."""
        try:
            await self._calls.call(call, "GET", "/health")
        except CallFailed as error:
            if error.code is not grpc.StatusCode.UNAVAILABLE:
                raise
            return pb.HealthCheckResponse(healthy=False, message=error.message)
        return pb.HealthCheckResponse(healthy=True, message="Health")

    async def Abort(self, request: Any, call: Call) -> Any:  # noqa: N802
        """End requests by their ids."""
        ids: list[str] = await call.convert(list, request.request_ids)
        body = {"request_ids": ids}
        await self._calls.call(call, "POST", "/inference/v1/abort_requests", body)
        return pb.AbortResponse()

    async def FlushCache(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Clear the prefix cache; needs --server-dev-mode."""
        if request.timeout_s:
            raise invalid("timeout_s", "is not supported: the cache is cleared at once")
        answer = await self._calls.call(call, "POST", "/reset_prefix_cache")
        return common.FlushCacheResponse(success=answer["success"], message="prefix cache cleared")

    async def StartProfile(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Start profiling; needs --profiler-config, which says how."""
        if request.ListFields():
            raise invalid("StartProfile", "takes no fields: set them in --profiler-config")
        await self._calls.call(call, "POST", "/start_profile")
        return common.ProfileResponse(success=True, message="profiling")

    async def StopProfile(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Stop profiling and write the trace."""
        await self._calls.call(call, "POST", "/stop_profile")
        return common.ProfileResponse(success=True, message="the trace is written")

    async def GetModelInfo(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Facts about the model."""
        names = await self._names(call)
        info = self._context.engine.info
        tokenizer = self._context.engine.tokenizer
        special = {} if tokenizer is None else dict(tokenizer.special)
        ids = {} if tokenizer is None else {
            name: tokenizer.token_to_id(special[f"{name}_token"])
            for name in ("pad", "bos") if isinstance(special.get(f"{name}_token"), str)
        }  # fmt: skip
        return pb.GetModelInfoResponse(
            model_path=self._context.config.model.model,
            is_generation="generate" in info.tasks,
            max_context_length=info.max_model_len,
            vocab_size=info.vocabulary,
            supports_vision=bool(info.limit("media", "items")),
            served_model_name=names[0],
            tokenizer_path=self._context.config.model.tokenizer or self._context.config.model.model,
            architectures=[info.architecture],
            eos_token_ids=list(info.eos),
            pad_token_id=ids.get("pad") or 0,
            bos_token_id=ids.get("bos") or 0,
            max_req_input_len=info.max_model_len,
            default_sampling_params_json=msgspec.json.encode(dict(info.defaults)).decode(),
        )

    async def GetServerInfo(self, request: Any, call: Call) -> Any:  # noqa: N802
        """The state of the server."""
        await self._names(call)
        engine = self._context.engine
        info, config = engine.info, engine.info.config
        outputs = config.structured_outputs
        waits = bool(outputs.reasoning_parser) and not outputs.enable_in_reasoning
        won = {d.subject.partition(" ")[0]: d.winner or "" for d in info.description.decisions}
        return pb.GetServerInfoResponse(
            active_requests=engine.active,
            is_paused=await engine.is_paused(),
            last_receive_timestamp=self._latest,
            uptime_seconds=time.time() - self._began,
            server_type="vllm-grpc",
            data_parallel_size=config.parallel.data_parallel_size,
            kv_cache_dtype=str(config.value("kv_cache_dtype") or "auto"),
            block_size=info.block_size,
            attention_backend=won.get("attention", ""),
            model_dtype=str(info.dtype),
            max_num_seqs=config.scheduler.max_num_seqs or 0,
            engine_reasoning_parser=outputs.reasoning_parser or "",
            constrained_decoding_start="after_reasoning" if waits else "first_token",
        )

    async def GetLoads(self, request: Any, call: Call) -> Any:  # noqa: N802
        """The load of the engine, of all replicas together."""
        await self._names(call)
        engine = self._context.engine
        stats, info = engine.stats, engine.info
        running, waiting = (0, 0) if stats is None else (stats.running, stats.waiting)
        usage = 0.0 if stats is None else float(stats.usage)
        load = pb.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=round(usage * info.cache_tokens),
            max_total_num_tokens=info.cache_tokens,
            token_usage=usage,
            max_running_requests=info.config.scheduler.max_num_seqs or 0,
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=modulm.__version__,
            dp_rank_count=1,
            loads=[load],
        )

    async def GetTokenizer(self, request: Any, call: Call) -> AsyncIterator[Any]:  # noqa: N802
        """The files of the tokenizer as a zip archive, in pieces."""
        await self._names(call)
        path = Path(tokenizer_path(self._context.config, self._context.engine.info.path))
        if self._archive is None or (self._archive.done() and self._archive.exception()):
            self._archive = asyncio.ensure_future(asyncio.to_thread(_archive, path))
        data, digest = await asyncio.shield(self._archive)
        for start in range(0, len(data), _CHUNK):
            is_last = start + _CHUNK >= len(data)
            yield common.GetTokenizerChunk(
                data=data[start : start + _CHUNK], sha256=digest if is_last else ""
            )

    async def _names(self, call: Call) -> list[str]:
        """The served models, which only who has a key may see."""
        answer = await self._calls.call(call, "GET", "/v1/models")
        return [model["id"] for model in answer["data"]] or [""]


def _media_parts(items: Any) -> list[dict[str, Any]]:
    """The content parts for `media_refs`. Raises CallFailed."""
    check_entries("media_refs", items)
    parts = []
    for at, item in enumerate(items):
        kind = _MODALITIES.get(item.modality)
        if kind is None:
            raise invalid(f"media_refs[{at}].modality", "must be IMAGE, AUDIO or VIDEO")
        if not item.url:
            raise invalid(f"media_refs[{at}].url", "is missing")
        parts.append(media_part(kind, item.url))
    return parts


def _archive(folder: Path) -> tuple[bytes, str]:
    """A zip archive of the tokenizer's files, and its digest. Raises CallFailed without any."""
    found = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        raise CallFailed(
            grpc.StatusCode.FAILED_PRECONDITION, "the tokenizer is not in files of its own"
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in found:
            archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes())
    data = buffer.getvalue()
    return data, hashlib.sha256(data).hexdigest()


def _sampling(params: Any) -> dict[str, Any]:
    """`sampling_params`. A top_p or repetition_penalty of 0 is none, other zeros are meant."""
    check_entries("sampling_params.logit_bias", params.logit_bias)
    check_entries("sampling_params.stop", params.stop)
    values: dict[str, Any] = {
        "temperature": params.temperature if params.HasField("temperature") else 1.0,
        "min_p": params.min_p,
        "top_k": params.top_k,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "min_tokens": params.min_tokens,
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": params.skip_special_tokens,
        "spaces_between_special_tokens": params.spaces_between_special_tokens,
        "include_stop_str_in_output": params.include_stop_str_in_output,
    }
    for name in ("max_tokens", "logprobs", "prompt_logprobs", "seed", "truncate_prompt_tokens"):
        if params.HasField(name):
            values[name] = getattr(params, name)
    optional = {
        "n": params.n,
        "top_p": params.top_p,
        "repetition_penalty": params.repetition_penalty,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()},
        "structured_outputs": structured_outputs(
            params, "constraint", ("json_schema", "json"), "sampling_params"
        ),
    }
    return values | {name: value for name, value in optional.items() if value}


def _count(params: Any, name: str) -> int | None:
    return getattr(params, name) if params.HasField(name) else None


def _chunks(
    event: Mapping[str, Any], totals: dict[int, int], logprobs: int | None
) -> Iterator[Any]:
    """The messages for an event of a stream. totals: tokens so far by choice, which it adds to."""
    for choice in event.get("choices") or ():
        index, ids = choice["index"], choice["token_ids"]
        totals[index] = totals.get(index, 0) + len(ids)
        usage = event.get("usage") or {}
        yield pb.GenerateResponse(
            chunk=pb.GenerateStreamChunk(
                token_ids=ids,
                prompt_tokens=usage.get("prompt_tokens", 0),
                completion_tokens=len(ids),
                output_logprobs=_logprobs(choice, logprobs),
                index=index,
            )
        )
        if choice["finish_reason"] is not None:
            yield _complete({**choice, "token_ids": []}, event, totals[index], None)


def _complete(
    choice: Mapping[str, Any], answer: Mapping[str, Any], generated: int, logprobs: int | None
) -> Any:
    """The last message of a choice."""
    usage = answer.get("usage") or {}
    stop = choice["stop_reason"]
    matched = {} if stop is None else {
        "matched_stop_str" if isinstance(stop, str) else "matched_token_id": stop
    }  # fmt: skip
    details = usage.get("prompt_tokens_details") or {}
    transferred = answer.get("kv_transfer_params")
    if transferred is not None:
        matched["kv_transfer_params_json"] = msgspec.json.encode(transferred).decode()
    return pb.GenerateResponse(
        complete=pb.GenerateComplete(
            output_ids=choice["token_ids"],
            finish_reason=choice["finish_reason"] or "stop",
            prompt_tokens=usage.get("prompt_tokens", 0),
            completion_tokens=generated,
            cached_tokens=details.get("cached_tokens", 0),
            output_logprobs=_logprobs(choice, logprobs),
            input_logprobs=_prompt_logprobs(answer),
            index=choice["index"],
            **matched,
        )
    )


def _logprobs(choice: Mapping[str, Any], most: int | None) -> Any:
    content = (choice.get("logprobs") or {}).get("content")
    if most is None or not content:
        return None
    table = pb.OutputLogProbs()
    for position in content:
        table.token_logprobs.append(position["logprob"])
        table.token_ids.append(position["token_id"])
        if most:
            best = position["top_logprobs"]
            table.top_logprobs.add(
                values=[one["logprob"] for one in best],
                token_ids=[one["token_id"] for one in best],
            )
    return table


def _prompt_logprobs(answer: Mapping[str, Any]) -> Any:
    positions = answer.get("prompt_logprobs")
    if not positions:
        return None
    table = pb.InputLogProbs()
    for token, position in zip(answer.get("prompt_token_ids") or (), positions, strict=False):
        entries = position or {}
        own = entries.get(str(token))
        entry = table.token_logprobs.add()
        if own is not None:
            entry.value = own["logprob"]
        table.token_ids.append(token)
        table.top_logprobs.add(
            values=[one["logprob"] for one in entries.values()],
            token_ids=[int(name) for name in entries],
        )
    return table
