"""Request bodies, and their conversion to the server's types."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from modulm.contracts.sampling import OutputKind, SamplingParams, StructuredOutputs
from modulm_media.messages import MediaSource
from modulm_parsing import thinking_variables
from modulm_samplers import sampler_arguments
from modulm_server.constraints import from_response_format
from modulm_server.json_body import bad_field

__all__ = [
    "AnyRequest",
    "ChatRequest",
    "CopyRequest",
    "CreateRequest",
    "EmbedRequest",
    "EmbeddingsRequest",
    "GenerateRequest",
    "NamedRequest",
    "Options",
    "constraint_of",
    "messages_of",
    "params_of",
    "variables_of",
    "with_images",
]

log = logging.getLogger("modulm_server")

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Think = bool | Literal["low", "medium", "high", "max"]

#: Images of one message; the model has a lower limit.
_MAX_IMAGES = 1_024


class Options(Struct, kw_only=True):
    """`options`. num_predict: -1 and -2 for as many as fit. Options of the process that runs the
    model (num_gpu, num_thread, use_mmap ...) are ignored; the server has flags for these.
    """

    num_predict: Annotated[int, Meta(ge=-2, le=2**31 - 1)] | None = None
    num_ctx: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Count | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repeat_last_n: int | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None
    mirostat_eta: float | None = None
    mirostat_tau: float | None = None
    penalize_newline: bool | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    embedding_only: bool | None = None


class NamedRequest(Struct, kw_only=True):
    """A request about a model, in `model` or, from older clients, `name`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    insecure: bool | None = None
    stream: bool = True


class CreateRequest(Struct, kw_only=True):
    """`/api/create`. modelfile: as older clients send it; the other fields are those of newer ones,
    and win. files, adapters: name -> digest of an upload to /api/blobs.
    """

    model: str | None = None
    name: str | None = None
    base: str | None = field(default=None, name="from")
    files: dict[str, str] = {}
    adapters: dict[str, str] = {}
    modelfile: str | None = None
    template: str | None = None
    system: str | None = None
    parameters: dict[str, Any] = {}
    license: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    quantize: str | None = None
    stream: bool = True


class CopyRequest(Struct, kw_only=True):
    """`/api/copy`."""

    source: str
    destination: str


class AnyRequest(Struct, kw_only=True):
    """Common fields of generation requests. keep_alive is ignored."""

    model: str
    stream: bool = True
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    keep_alive: float | str | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class ChatRequest(AnyRequest, kw_only=True):
    """`/api/chat`."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class GenerateRequest(AnyRequest, kw_only=True):
    """`/api/generate`."""

    prompt: str | None = None
    suffix: str | None = None
    images: list[str] | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None


class EmbedRequest(Struct, kw_only=True):
    """`/api/embed`."""

    model: str
    input: str | list[str]
    truncate: bool = True
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    options: Options | None = None
    keep_alive: float | str | None = None


class EmbeddingsRequest(Struct, kw_only=True):
    """`/api/embeddings`, the older form for one text."""

    model: str
    prompt: str
    options: Options | None = None
    keep_alive: float | str | None = None


#: Options of unsupported samplers, and the values with which they have no effect.
_NEUTRAL: Mapping[str, tuple[float, ...]] = {"tfs_z": (1,)}
#: Options of samplers that packages have.
_SAMPLERS = ("typical_p", "mirostat", "mirostat_tau", "mirostat_eta")


def params_of(
    body: AnyRequest,
    defaults: Mapping[str, Any],
    context_length: int,
    constraint: StructuredOutputs | None,
) -> SamplingParams:
    """Build sampling parameters. defaults: the model's; context_length: in tokens.

    Raises ApiError(400) naming the option.
    """
    options = body.options or Options()
    for name, neutral in _NEUTRAL.items():
        if getattr(options, name) not in (None, *neutral):
            raise bad_field("options", f"options.{name} is not supported; leave it out")
    if (options.num_ctx or 0) > context_length:
        log.info(
            "options.num_ctx %d is more than --max-model-len: the context has %d tokens",
            options.num_ctx,
            context_length,
        )
    values: dict[str, Any] = {
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "seed": options.seed,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
    }
    chosen = {name: value for name, value in values.items() if value is not None}
    limit = options.num_predict
    if limit is not None:
        chosen["max_tokens"] = limit if limit >= 0 else None
    return SamplingParams(
        **{"max_tokens": None, **defaults, **chosen},
        stop=options.stop,
        structured_outputs=constraint,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        output_kind=OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY,
        extra_args=sampler_arguments({name: getattr(options, name) for name in _SAMPLERS}) or None,
    )


def constraint_of(response_format: str | Mapping[str, Any] | None) -> StructuredOutputs | None:
    """`format`: "json", or a JSON schema. Raises ApiError(400)."""
    if response_format is None or response_format == "":
        return None
    if response_format == "json":
        return StructuredOutputs(json_object=True)
    if isinstance(response_format, str):
        raise bad_field("format", 'format must be "json" or a JSON schema')
    json_schema_format = {
        "type": "json_schema",
        "json_schema": {"name": "format", "schema": response_format},
    }
    return from_response_format(json_schema_format, "format")


def variables_of(think: Think | None, parser: str | None) -> dict[str, Any]:
    """The template variables for `think`."""
    effort = think if isinstance(think, str) else None
    return thinking_variables(parser, effort, None if think is None else think is not False)


def messages_of(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages to OpenAI's form: calls get ids, and results refer to earlier calls.

    Raises ApiError(400).
    """
    converted: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if role not in ("system", "user", "assistant", "tool", "developer"):
            raise bad_field(
                "messages", f"messages[{index}].role must be system, user, assistant or tool"
            )
        content = message.get("content") or ""
        if not isinstance(content, str):
            raise bad_field("messages", f"messages[{index}].content must be text")
        content_parts = with_images(content, message.get("images"), f"messages[{index}].images")
        turn: dict[str, Any] = {"role": role, "content": content_parts}
        if message.get("thinking"):
            turn["reasoning"] = message["thinking"]
        if calls := message.get("tool_calls"):
            turn["tool_calls"] = _calls(calls, index)
            waiting = [(c["function"]["name"], c["id"]) for c in turn["tool_calls"]]
        if role == "tool":
            turn["tool_call_id"] = _matching_call_id(waiting, message.get("tool_name"), index)
        converted.append(turn)
    return converted


def with_images(text: str, images: Any, where: str) -> Any:
    """Build a message's content: base64 images first, then the text."""
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(one, str) for one in images):
        raise bad_field(where.partition("[")[0], f"{where} must be a list of base64 files")
    if len(images) > _MAX_IMAGES:
        raise bad_field(where.partition("[")[0], f"{where} has more than {_MAX_IMAGES} images")
    sources = [
        MediaSource(kind="image", field=f"{where}[{index}]", data=data)
        for index, data in enumerate(images)
    ]
    return [*sources, {"type": "text", "text": text}] if text else sources


def _calls(calls: Any, index: int) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise bad_field("messages", f"messages[{index}].tool_calls must be a list")
    converted = []
    for position, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        table = function if isinstance(function, dict) else {}
        name, arguments = table.get("name"), table.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            where = f"messages[{index}].tool_calls[{position}].function"
            raise bad_field("messages", f"{where} must have a name and an object of arguments")
        converted.append(
            {
                "id": f"call_{index}_{position}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        )
    return converted


def _matching_call_id(waiting: list[tuple[str, str]], name: Any, index: int) -> str:
    """The id of the call that a result belongs to: the next one of its name, or any next one."""
    match = next((one for one in waiting if one[0] == name), waiting[0] if waiting else None)
    if match is None:
        return f"call_{index}"
    waiting.remove(match)
    return match[1]
