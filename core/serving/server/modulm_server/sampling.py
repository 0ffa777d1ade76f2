"""The sampling fields of the OpenAI-compatible APIs, and their conversion to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from attrs import evolve
from msgspec import UNSET, Meta, Struct, UnsetType

from modulm.contracts.sampling import OutputKind, SamplingParams, StructuredOutputs
from modulm_expert_routes import with_replay
from modulm_frontend.beam_search import BeamSearchParams
from modulm_samplers import SAMPLERS, sampler_arguments
from modulm_server.absent_fields import GENERATION, Absent
from modulm_server.json_body import bad_field
from modulm_server.prompt_caching import held_prompt, with_held
from modulm_server.request_guard import RequestLimits
from modulm_server.transfer import with_transfer

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm_server.prompts import Prompt

__all__ = [
    "LIMITS",
    "Budget",
    "Priority",
    "Salt",
    "SamplerFields",
    "SamplingFields",
    "StreamOptions",
    "StructuredFields",
    "check_priority",
    "check_schema",
    "reject_unsupported",
    "sampling_params",
    "shortened",
]

LIMITS = RequestLimits()

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
#: Maximum number of thinking tokens; -1 for no limit.
Budget = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Salt = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:=+/-]{1,256}$")]


class StreamOptions(Struct, kw_only=True):
    """`stream_options`. `include_obfuscation` is accepted and ignored."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class StructuredFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """`structured_outputs`: one constraint and its options."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class SamplerFields(Struct, kw_only=True):
    """Fields for logits processors: of any in `vllm_xargs`, of samplers by llama.cpp's names."""

    vllm_xargs: dict[str, Any] | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    top_n_sigma: float | None = None
    typical_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    logits_processors: list[Any] | None = None

    def arguments(self) -> dict[str, Any] | None:
        """`SamplingParams.extra_args`: the settings of samplers that are on, and vllm_xargs.

        Raises ApiError(400) if the request names code.
        """
        self.refuse_code()
        samplers = sampler_arguments({name: getattr(self, name) for name in _SAMPLER_FIELDS})
        return {**(self.vllm_xargs or {}), **samplers} or None

    def refuse_code(self) -> None:
        """Raise ApiError(400) if the request names code."""
        if self.logits_processors:
            raise bad_field(
                "logits_processors",
                "logits_processors: a request cannot name code; install logits processors as "
                "plugins, and set their fields in vllm_xargs",
            )


class SamplingFields(SamplerFields, kw_only=True):
    """The common fields of completions and chat: OpenAI's, and vLLM's additional ones."""

    absent: ClassVar[Absent] = GENERATION

    model: str | UnsetType = UNSET
    n: Annotated[int, Meta(ge=1, le=LIMITS.n)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=LIMITS.n)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Meta(ge=1)] | None = None
    include_metrics: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_offsets: bool | None = None
    return_weight_versions: bool | None = None
    priority: Priority | None = None
    request_id: Annotated[str, Meta(max_length=LIMITS.name)] | None = None
    cache_salt: Salt | None = None
    user: Annotated[str, Meta(max_length=LIMITS.metadata_value)] | None = None
    speculative: bool | Annotated[int, Meta(ge=0)] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    logprob_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=LIMITS.name)] | None = None
    prompt_cache_retention: str | None = None
    repetition_detection: dict[str, Any] | None = None
    thinking_token_budget: Budget | None = None
    routed_experts_prompt_start: Count | None = None
    routed_experts: str | None = None


def check_priority(config: EngineConfig, priority: int | None) -> int:
    """Validate a request's priority. Raises ApiError(400) if the scheduler ignores priorities."""
    if priority and config.scheduler.scheduling_policy == "fcfs":
        raise bad_field(
            "priority", "priority is not enabled: start the server with "
            "--scheduling-policy priority"
        )  # fmt: skip
    return priority or 0


def shortened(prompt: Prompt, body: SamplingFields) -> Prompt:
    """Keep the first `truncate_prompt_tokens` of a prompt with `truncation_side: right`; otherwise
    the engine keeps the last ones. Raises ApiError(400).
    """
    most = body.truncate_prompt_tokens
    if body.truncation_side != "right" or most is None or prompt.embeds or prompt.media:
        return prompt
    if most < 1:
        raise bad_field(
            "truncate_prompt_tokens", "truncate_prompt_tokens must be at least 1 with "
            "truncation_side: right"
        )  # fmt: skip
    if len(prompt.ids) <= most:
        return prompt
    return evolve(prompt, ids=prompt.ids[:most], text=None)


def reject_unsupported(body: Struct, *names: str, instead: str = "") -> None:
    """Raise ApiError(400) for fields that are not supported yet. instead: the field to use."""
    fix = f"Use {instead} instead." if instead else "Leave it out."
    for name in names:
        if getattr(body, name):
            raise bad_field(name, f"Not supported yet: {name}. {fix}", "unsupported")


def sampling_params(
    body: SamplingFields,
    *,
    defaults: Mapping[str, Any],
    max_tokens: int | None,
    logprobs: int | None,
    constraint: StructuredOutputs | None,
) -> SamplingParams | BeamSearchParams:
    """Build the engine's parameters. defaults: from the model's generation config.

    Lists, texts and what depends on the model (vocabulary, context length) are checked by
    `modulm_frontend.validation`. Raises ApiError(400) naming the field.
    """
    body.refuse_code()
    if body.prompt_logprobs is not None and body.stream:
        raise bad_field("prompt_logprobs", "prompt_logprobs is not supported with stream: true")
    if body.stream_options is not None and not body.stream:
        raise bad_field("stream_options", "stream_options needs stream: true")
    if body.use_beam_search:
        if constraint is not None:
            raise bad_field(
                "use_beam_search", "use_beam_search cannot be combined with structured outputs"
            )
        reject_unsupported(
            body, "kv_transfer_params", "prompt_cache_retention", "logprob_token_ids",
            "repetition_detection", "routed_experts",
        )  # fmt: skip
        return _beams(body, defaults, max_tokens, logprobs)
    if body.early_stopping:
        raise bad_field("early_stopping", "early_stopping needs use_beam_search: true")
    if body.length_penalty not in (None, 1):
        raise bad_field("length_penalty", "length_penalty needs use_beam_search: true")
    if body.stream and (body.best_of or 0) > (body.n or 1):
        raise bad_field("best_of", "best_of greater than n cannot be streamed")
    values = {name: getattr(body, name) for name in _PLAIN}
    chosen = {name: value for name, value in values.items() if value is not None}
    return SamplingParams(
        **{**_defaults(defaults), **chosen},
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        max_tokens=max_tokens,
        logprobs=logprobs,
        bad_words=body.bad_words,
        logprob_token_ids=body.logprob_token_ids,
        repetition_detection=body.repetition_detection,
        structured_outputs=constraint,
        output_kind=OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY,
        extra_args=_extra_args(body),
    )


def _extra_args(body: SamplingFields) -> dict[str, Any] | None:
    """Return `SamplingParams.extra_args`."""
    arguments = with_held(
        body.arguments(), held_prompt(body.prompt_cache_key, body.prompt_cache_retention)
    )
    arguments = with_transfer(arguments, body.kv_transfer_params)
    return with_replay(arguments, body.routed_experts_prompt_start, body.routed_experts)


def _beams(
    body: SamplingFields, defaults: Mapping[str, Any], max_tokens: int | None, logprobs: int | None
) -> BeamSearchParams:
    """Build the parameters of a beam search. Raises ApiError(400) for unsupported fields."""
    if body.stream:
        raise bad_field("stream", "stream is not supported with use_beam_search")
    off = {sampler.switch: sampler.off for sampler in SAMPLERS}
    for name, neutral in {**_NEUTRAL, **off}.items():
        if getattr(body, name) not in (None, *neutral):
            raise bad_field(name, f"{name} has no effect with use_beam_search; leave it out")
    width = body.n or 1
    if width > LIMITS.beams:
        raise bad_field("n", f"n: at most {LIMITS.beams} beams are allowed")
    return BeamSearchParams(
        width,
        max_tokens,
        bool(body.ignore_eos),
        temperature=_defaults(defaults).get("temperature", 1.0)
        if body.temperature is None
        else body.temperature,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        early_stopping=body.early_stopping or False,
        stop_token_ids=body.stop_token_ids,
        logprobs=logprobs,
        skip_special_tokens=body.skip_special_tokens is not False,
        spaces_between_special_tokens=body.spaces_between_special_tokens is not False,
    )


#: Fields that change how single tokens are sampled, and the values with which they have no effect.
#: A beam search uses the model's own probabilities and ignores a seed.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "stop": ([],),
    "thinking_token_budget": (-1,),
    "top_k": (0, -1),
    "top_p": (1,),
    "truncate_prompt_tokens": (),
}
#: Fields that are passed to SamplingParams unchanged.
_PLAIN = (
    "allowed_token_ids",
    "best_of",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "min_p",
    "min_tokens",
    "n",
    "presence_penalty",
    "prompt_logprobs",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "speculative",
    "stream_interval",
    "temperature",
    "thinking_token_budget",
    "top_k",
    "top_p",
    "truncate_prompt_tokens",
)
#: Fields of samplers that packages have (`modulm_samplers`).
_SAMPLER_FIELDS = tuple(name for sampler in SAMPLERS for name in sampler.settings)
#: Settings of generation_config.json that become defaults.
_DEFAULTABLE = ("min_p", "repetition_penalty", "temperature", "top_k", "top_p")


def _defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    return {name: generation[name] for name in _DEFAULTABLE if generation.get(name) is not None}


def check_schema(schema: Any, param: str) -> None:
    """Raise ApiError(400) for a JSON schema that is not an object, or too large or deep."""
    if not isinstance(schema, Mapping):
        raise bad_field(param, f"{param}: a JSON schema must be an object")
    if _depth(schema) > LIMITS.schema_depth:
        raise bad_field(param, f"{param}: the schema is nested deeper than {LIMITS.schema_depth}")
    try:
        size = len(msgspec.json.encode(schema))
    except OverflowError as error:
        raise bad_field(param, f"{param}: an integer of more than 64 bits") from error
    if size > LIMITS.schema_bytes:
        raise bad_field(param, f"{param}: the schema is larger than {LIMITS.schema_bytes} bytes")


def _depth(value: Any) -> int:
    """The nesting depth of containers, counted level by level to avoid recursion."""
    level, depth = [value], 0
    while level and depth <= LIMITS.schema_depth:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        level, depth = inner, depth + 1
    return depth
