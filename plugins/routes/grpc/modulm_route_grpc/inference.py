"""The service `vllm.Inference`: generation from text or tokens, whole or streamed."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

import grpc
import msgspec
from attrs import define, field
from google.protobuf.json_format import MessageToDict, ParseDict

from modulm_route_grpc.descriptors import message
from modulm_route_grpc.http_calls import Call, CallFailed, HttpCalls

if TYPE_CHECKING:
    from modulm_server.route import RouteContext

__all__ = [
    "Inference",
    "check_entries",
    "invalid",
    "json_object",
    "media_part",
    "structured_outputs",
]

#: Most texts of a list, and tokens of a map, which become objects before HTTP's limits apply.
_ENTRIES = 1 << 14
#: What the proto states for a request without max_new_tokens.
_MAX_TOKENS = 20
_GenerateResponse = message("GenerateResponse")
_FinishInfo = message("FinishInfo")
#: Names in content parts by the proto's numbers.
_MODALITIES = {1: "image", 2: "video", 3: "audio"}
#: Fields that are refused, and what to do instead.
_REFUSED = {
    "session_id": "set kv.cache_salt to keep cached prefixes apart",
    "kv_hints": "leave it out",
    "engine_reasoning_gate": "constraints apply from the first token; leave it out",
}


class Inference:
    """Answers through `/tokenize` and `/inference/v1/generate`."""

    def __init__(self, context: RouteContext, calls: HttpCalls) -> None:
        self._calls = calls
        self._eos = frozenset(context.engine.info.eos)
        self._context_tokens = context.engine.info.max_model_len

    async def Generate(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Answer a request with one response."""
        if request.sampling.num_sequences > 1:
            raise invalid("sampling.num_sequences", "above 1 needs GenerateStream")
        body = await self._body(request, call)
        progress = _Progress(request)
        (response,) = await self._calls.call(
            call, "POST", "/inference/v1/generate", body, request_id=request.request_id,
            read=lambda answer: list(self._responses(progress, answer)),
        )  # fmt: skip
        return response

    async def GenerateStream(  # noqa: N802
        self, request: Any, call: Call
    ) -> AsyncIterator[Any]:
        """Answer a request as its tokens come."""
        if request.response.prompt_logprobs:
            raise invalid("response.prompt_logprobs", "needs Generate, which answers at the end")
        body = await self._body(request, call)
        body["stream"] = True
        body["stream_options"] = {"continuous_usage_stats": True, "include_usage": True}
        progress = _Progress(request)
        last: dict[int, Any] = {}
        stream = self._calls.stream(
            call, "/inference/v1/generate", body, request_id=request.request_id,
            read=lambda event: (list(self._responses(progress, event)), event.get("usage")),
        )  # fmt: skip
        cached = 0
        async for responses, usage in stream:
            for response in responses:
                if response.outputs.HasField("finish_info"):
                    last[response.outputs.index] = response  # until the usage is known
                else:
                    yield response
            details = (usage or {}).get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens", cached)
        for response in last.values():
            response.outputs.finish_info.num_cached_tokens = cached
            yield response

    async def _body(self, request: Any, call: Call) -> dict[str, Any]:
        """The body for `/inference/v1/generate`."""
        for name, instead in _REFUSED.items():
            present = request.ListFields()
            if any(descriptor.name == name for descriptor, _ in present):
                raise invalid(name, f"is not supported: {instead}")
        if request.HasField("watermarking") and request.watermarking:
            raise invalid("watermarking", "is not supported: leave it out or set it to false")
        model = request.lora_name or request.model
        named = {"model": model} if model else {}
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise invalid("prompt", "is missing: send text or token_ids")
        if kind == "text":
            tokens = await self._calls.call(
                call, "POST", "/tokenize", {"prompt": request.text, **named}
            )
            ids = tokens["tokens"]
        else:
            given = len(request.token_ids.ids)
            most = self._context_tokens  # 0: of several models
            if 0 < most < given and not request.truncate_prompt_tokens:
                raise invalid("token_ids", f"has {given} tokens, the context {most}")
            ids = await call.convert(list, request.token_ids.ids)
        return {**named, "token_ids": ids, **await call.convert(_options, request)}

    def _responses(self, progress: _Progress, answer: Mapping[str, Any]) -> Iterator[Any]:
        """The messages for an answer or an event: one for each choice in it."""
        for choice in answer.get("choices") or ():
            response = _GenerateResponse()
            if progress.first:
                progress.first = False
                _fill_prompt(response.prompt_info, progress.request, answer)
            self._fill(response.outputs, progress, choice, answer)
            yield response

    def _fill(
        self, output: Any, progress: _Progress, choice: Mapping[str, Any], answer: Mapping[str, Any]
    ) -> None:
        options = progress.request.response
        ids = choice["token_ids"]
        output.index = choice["index"]
        output.text = choice.get("text") or ""
        output.num_tokens = len(ids)
        if options.output_token_ids:
            output.token_ids.extend(ids)
        if options.output_logprobs and choice["logprobs"]:
            for position in choice["logprobs"]["content"]:
                output.logprobs.append(position["logprob"])
                output.ranks.append(position["rank"] or 0)
                _add_candidates(
                    output.candidate_tokens.add(),
                    [one for one in position["top_logprobs"]
                     if one["token_id"] != position["token_id"]],
                )  # fmt: skip
        counts = progress.generated
        counts[output.index] = counts.get(output.index, 0) + len(ids)
        if choice["finish_reason"] is not None:
            self._finish(output.finish_info, choice, counts[output.index], answer)

    def _finish(
        self, info: Any, choice: Mapping[str, Any], generated: int, answer: Mapping[str, Any]
    ) -> None:
        reasons = {"length": _FinishInfo.LENGTH, "stop": _FinishInfo.STOP}
        info.num_output_tokens = generated
        info.finish_reason = reasons.get(choice["finish_reason"], _FinishInfo.ABORTED)
        stop, ids = choice["stop_reason"], choice["token_ids"]
        if info.finish_reason == _FinishInfo.STOP:
            if isinstance(stop, str):
                info.stop_string = stop
            elif stop is not None:
                info.stop_token_id = stop
            elif ids and ids[-1] in self._eos:
                info.eos_token_id = ids[-1]
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        info.num_cached_tokens = details.get("cached_tokens", 0)
        if answer.get("kv_transfer_params") is not None:
            ParseDict(answer["kv_transfer_params"], info.kv_transfer_params)


@define
class _Progress:
    """What has been sent of an answer. generated: tokens by choice."""

    request: Any
    first: bool = True
    generated: dict[int, int] = field(factory=dict)


def _options(request: Any) -> dict[str, Any]:
    """The body for `/inference/v1/generate`, but for the model and the prompt."""
    wants_text = not request.response.HasField("output_text") or request.response.output_text
    body = {
        "sampling_params": _sampling(request),
        "output_mode": "text" if wants_text else "tokens",
        "return_token_ids": True,
        "priority": request.priority or None,
        "cache_salt": request.kv.cache_salt or None,
    }
    if request.media:
        check_entries("media", request.media)
        body["content_parts"] = [_media_part(at, item) for at, item in enumerate(request.media)]
    if request.request_id:
        body["request_id"] = request.request_id
    if request.kv.HasField("kv_transfer_params"):
        body["kv_transfer_params"] = _json_values(request.kv.kv_transfer_params)
    return body


def media_part(kind: str, url: str, uuid: str = "") -> dict[str, Any]:
    """The content part of a message for an image, a video or a sound."""
    name = f"{kind}_url"
    return {"type": name, name: {"url": url}, **({"uuid": uuid} if uuid else {})}


def _media_part(at: int, item: Any) -> dict[str, Any]:
    """The content part for one of `media`. Raises CallFailed."""
    field = f"media[{at}]"
    kind = _MODALITIES.get(item.modality)
    if kind is None:
        raise invalid(f"{field}.modality", "must be IMAGE, VIDEO or AUDIO")
    source = item.WhichOneof("source")
    if source == "features":
        raise invalid(f"{field}.features", "is not supported: send url, data_uri or raw_bytes")
    if source is None and not item.uuid:
        raise invalid(field, "needs url, data_uri or raw_bytes")
    if source is None:
        return {"type": f"{kind}_url", f"{kind}_url": None, "uuid": item.uuid}
    if source == "raw_bytes":
        data = b64encode(item.raw_bytes).decode()
        url = f"data:{item.mime_type or 'application/octet-stream'};base64,{data}"
        return media_part(kind, url, item.uuid)
    url = item.url if source == "url" else item.data_uri
    if url.startswith("data:") != (source == "data_uri"):
        raise invalid(f"{field}.{source}", "data: URLs are data_uri, others url")
    return media_part(kind, url, item.uuid)


def _sampling(request: Any) -> dict[str, Any]:
    """`sampling_params`. Fields that are left out, and those of value 0 that mean none, are not
    in it.
    """
    sampling, decoding, stopping = request.sampling, request.decoding, request.stopping
    options = request.response
    check_entries("decoding.logit_bias", decoding.logit_bias)
    check_entries("stopping.stop_strings", stopping.stop_strings)
    params: dict[str, Any] = {
        "temperature": request.temperature if request.HasField("temperature") else 0.0,
        "max_tokens": stopping.max_new_tokens or _MAX_TOKENS,
        "ignore_eos": stopping.ignore_eos,
        "include_stop_str_in_output": stopping.include_stop_strings,
        "skip_special_tokens": not options.HasField("skip_special_tokens")
        or options.skip_special_tokens,
    }
    for part, names in (
        (sampling, ("top_k", "top_p", "min_p", "seed")),
        (stopping, ("thinking_token_budget",)),
    ):
        params |= {name: getattr(part, name) for name in names if part.HasField(name)}
    optional = {
        "n": sampling.num_sequences,
        "presence_penalty": decoding.presence_penalty,
        "frequency_penalty": decoding.frequency_penalty,
        "repetition_penalty": decoding.repetition_penalty,
        "logit_bias": {str(token): bias for token, bias in decoding.logit_bias.items()},
        "allowed_token_ids": list(decoding.allowed_token_ids),
        "structured_outputs": structured_outputs(
            decoding, "structured_output", ("json", "json"), "decoding"
        ),
        "min_tokens": stopping.min_new_tokens,
        "stop_token_ids": list(stopping.stop_token_ids),
        "stop": list(stopping.stop_strings),
        "truncate_prompt_tokens": request.truncate_prompt_tokens,
    }
    params |= {name: value for name, value in optional.items() if value}
    if decoding.bad_words_token_ids:
        raise invalid("decoding.bad_words_token_ids", "is not supported: use logit_bias")
    if request.kv.bypass_prefix_cache:
        raise invalid("kv.bypass_prefix_cache", "is not supported: send a new kv.cache_salt")
    if request.kv.HasField("ec_transfer_params"):
        raise invalid("kv.ec_transfer_params", "is not supported: use --ec-transfer-config")
    if options.output_logprobs:
        params |= _candidates(options.output_candidates, "logprobs")
    if options.prompt_logprobs:
        if options.prompt_candidates.WhichOneof("select") == "token_ids":
            raise invalid("response.prompt_candidates", "token_ids is not supported: use top_n")
        params |= _candidates(options.prompt_candidates, "prompt_logprobs")
    return params


def _candidates(candidates: Any, name: str) -> dict[str, Any]:
    """The number of log probabilities for a choice of candidates, or the tokens they are of."""
    kind = candidates.WhichOneof("select")
    if kind == "token_ids" and candidates.token_ids.ids:
        return {"logprob_token_ids": list(candidates.token_ids.ids)}
    if kind == "all" and candidates.all:
        return {name: -1}
    return {name: candidates.top_n if kind == "top_n" else 0}


def structured_outputs(
    message: Any, group: str, schema: tuple[str, str], parent: str
) -> dict[str, Any] | None:
    """`structured_outputs` for a field of a proto. schema: the name of the JSON schema's field, and
    ours. Raises CallFailed.
    """
    kind = message.WhichOneof(group)
    if kind is None:
        return None
    value = getattr(message, kind)
    if kind == schema[0]:
        return {schema[1]: json_object(value.encode(), f"{parent}.{kind}")}
    if kind == "choice":
        check_entries(f"{parent}.choice", value.choices)
        return {"choice": list(value.choices)}
    if kind == "json_object":
        return {"json_object": True} if value else None
    if kind == "structural_tag":
        return {"structural_tag": json_object(value.encode(), f"{parent}.{kind}")}
    return {kind: value}


def _fill_prompt(info: Any, request: Any, answer: Mapping[str, Any]) -> None:
    ids: Sequence[int] = answer.get("prompt_token_ids") or ()
    info.num_prompt_tokens = len(ids)
    if request.response.prompt_token_ids:
        info.token_ids.extend(ids)
    if not request.response.prompt_logprobs:
        return
    for token, position in zip(ids, answer.get("prompt_logprobs") or (), strict=False):
        entries = position or {}
        own = entries.get(str(token), {"logprob": 0.0, "rank": 0})
        info.logprobs.append(own["logprob"])
        info.ranks.append(own["rank"] or 0)
        others = [
            {"token_id": int(name), **entry}
            for name, entry in entries.items()
            if name != str(token)
        ]
        _add_candidates(info.candidate_tokens.add(), others)


def _add_candidates(position: Any, tokens: Sequence[Mapping[str, Any]]) -> None:
    for one in tokens:
        position.tokens.add(
            id=one["token_id"], logprob=one["logprob"], rank=max(one["rank"] or 0, 0)
        )


def _json_values(struct: Any) -> Any:
    """The object in a Struct. Raises CallFailed."""
    try:
        return _whole_numbers(MessageToDict(struct))
    except ValueError as error:
        raise invalid("kv.kv_transfer_params", f"must be JSON: {error}") from error


def _whole_numbers(value: Any) -> Any:
    """Convert the numbers of a Struct, which are all floating-point, back to integers."""
    if isinstance(value, dict):
        return {name: _whole_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if is_whole else value


def json_object(data: bytes, name: str) -> dict[str, Any]:
    """Read a field that has a JSON object. Raises CallFailed."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(name, f"must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise invalid(name, "must be a JSON object")
    return value


def check_entries(name: str, values: Sized) -> None:
    """Raise CallFailed for a field with too many entries."""
    if len(values) > _ENTRIES:
        raise invalid(name, f"must have at most {_ENTRIES} entries")


def invalid(name: str, problem: str) -> CallFailed:
    """The error for a field of a request."""
    return CallFailed(grpc.StatusCode.INVALID_ARGUMENT, f"{name}: {problem}")
