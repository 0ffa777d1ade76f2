"""Request bodies, and their conversion to the engine's parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from attrs import field, frozen
from msgspec import Meta, Struct

from modulm.contracts.sampling import OutputKind, SamplingParams, StructuredOutputs
from modulm_samplers import SAMPLERS as MORE
from modulm_samplers import sampler_arguments
from modulm_server.constraints import from_structured
from modulm_server.json_body import bad_field
from modulm_server.sampling import LIMITS, StructuredFields, check_schema

__all__ = [
    "SAMPLERS",
    "CompletionRequest",
    "EmbeddingRequest",
    "InfillRequest",
    "Settings",
    "TemplateRequest",
    "constraint_of",
    "params_of",
]

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Few = Annotated[int, Meta(ge=1, le=LIMITS.n)]
#: Supported samplers, in the engine's order.
SAMPLERS = ("dry", "penalties", "temperature", "top_n_sigma", "typ_p", "xtc", "min_p", "top_k",
            "top_p")  # fmt: skip
#: Other names of samplers, and the samplers of `modulm_samplers` by the setting that enables them.
_ALIASES = {"typical_p": "typ_p"}
_SWITCHES = {
    "dry": "dry_multiplier", "temperature": "dynatemp_range", "top_n_sigma": "top_n_sigma",
    "typ_p": "typical_p", "xtc": "xtc_probability",
}  # fmt: skip


class CompletionRequest(Struct, kw_only=True):
    """`/completion`. What chooses tokens in a way that is not here is refused by its name."""

    prompt: Any = None
    model: str | None = None
    n_predict: Annotated[int, Meta(ge=-2, le=2**31 - 1)] | None = None
    max_tokens: Annotated[int, Meta(ge=-2, le=2**31 - 1)] | None = None
    n_cmpl: Few | None = None
    stream: bool = False
    temperature: Annotated[float, Meta(le=100)] | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    typical_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-100, le=100)] | None = None
    samplers: Annotated[list[str], Meta(max_length=64)] | None = None
    min_keep: Count | None = None
    seed: int | None = None
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    logit_bias: Any = None
    n_probs: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    post_sampling_probs: bool = False
    grammar: str | None = None
    grammar_lazy: bool | None = None
    json_schema: Any = None
    cache_prompt: bool = True
    id_slot: int = -1
    return_tokens: bool = False
    return_progress: bool = False
    timings_per_token: bool = False
    t_max_predict_ms: float | None = None
    t_max_prompt_ms: float | None = None
    n_indent: int | None = None
    n_keep: int | None = None
    n_discard: int | None = None
    n_cache_reuse: int | None = None
    response_fields: Annotated[list[str], Meta(max_length=256)] | None = None
    sse_ping_interval: float | None = None
    lora: list[dict[str, Any]] | None = None


class InfillRequest(CompletionRequest, kw_only=True):
    """`/infill`. prompt: goes after the token that begins the middle."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[dict[str, Any]] | None = None


class TemplateRequest(Struct, kw_only=True):
    """`/apply-template`."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True


class EmbeddingRequest(Struct, kw_only=True):
    """`/embedding`. embd_normalize: 2 for Euclidean length 1, the only one, or -1 for none."""

    content: str | list[str]
    embd_normalize: int | None = None


#: Unsupported fields -> values without effect, and the error message for others.
_NEUTRAL: Mapping[str, tuple[tuple[float, ...], str]] = {
    "min_keep": ((0, 1), "one token is always kept, no more"),
    "n_indent": ((0,), "lines are not indented"),
    "t_max_predict_ms": ((0, -1), "time is not bounded; n_predict bounds tokens"),
    "t_max_prompt_ms": ((0, -1), "time is not bounded"),
    "post_sampling_probs": ((0,), "n_probs gives the model's own probabilities"),
    "grammar_lazy": ((0,), "a grammar holds from the first token"),
}
#: Sampling settings that a checkpoint may recommend under the same name, and the others.
_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p")
_PENALTIES = ("repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty")
#: Samplers that have no effect with their neutral settings.
_NEUTRAL_SAMPLERS = ("infill",)


@frozen(kw_only=True)
class Settings:
    """Sampling settings in llama.cpp's form."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    samplers: Sequence[str] = SAMPLERS
    #: Settings of `modulm_samplers`, by name.
    more: Mapping[str, Any] = field(factory=dict)

    @classmethod
    def of(cls, body: CompletionRequest, defaults: Mapping[str, Any]) -> Settings:
        """The settings of a request, with defaults of the checkpoint, then of llama.cpp.

        Raises ApiError(400) for an unsupported sampler.
        """
        for name, (neutral, reason) in _NEUTRAL.items():
            if getattr(body, name) not in (None, *neutral):
                raise bad_field(name, f"{name}: {reason}; leave it out", "unsupported")
        recommended = defaults.get
        settings = {name: defaults[name] for name in _RECOMMENDED if recommended(name) is not None}
        if recommended("repetition_penalty"):
            settings["repeat_penalty"] = defaults["repetition_penalty"]
        requested = {name: getattr(body, name) for name in (*_RECOMMENDED, *_PENALTIES)}
        settings |= {name: value for name, value in requested.items() if value is not None}
        samplers = _samplers(body.samplers)
        values = {name: getattr(body, name) for one in MORE for name in one.settings}
        values |= {switch: None for name, switch in _SWITCHES.items() if name not in samplers}
        return cls(**settings, samplers=samplers, more=sampler_arguments(values))

    def as_dict(self) -> dict[str, Any]:
        """The settings as responses show them."""
        neutral = {name: values[0] for name, (values, _) in _NEUTRAL.items()}
        neutral |= {one.switch: one.off[0] for one in MORE}
        del neutral["grammar_lazy"], neutral["t_max_prompt_ms"]
        settings = {name: getattr(self, name) for name in (*_RECOMMENDED, *_PENALTIES)}
        return {
            **neutral,
            "post_sampling_probs": False,
            **settings,
            **self.more,
            "samplers": list(self.samplers),
        }


def _samplers(names: Sequence[str] | None) -> Sequence[str]:
    """The enabled samplers, in the engine's order. Samplers not listed are off."""
    if names is None:
        return SAMPLERS
    names = [_ALIASES.get(name, name) for name in names]
    for name in names:
        if name not in SAMPLERS + _NEUTRAL_SAMPLERS:
            raise bad_field(
                "samplers", f"samplers: {name[:40]!r} is not one of {', '.join(SAMPLERS)}"
            )
    return tuple(name for name in SAMPLERS if name in names)


def params_of(
    body: CompletionRequest,
    settings: Settings,
    constraint: StructuredOutputs | None,
    bias: Mapping[int, float] | None,
) -> SamplingParams:
    """Build the engine's parameters. The engine checks what depends on the model."""
    limit = body.n_predict if body.n_predict is not None else body.max_tokens
    on = settings.samplers
    if "mirostat" in settings.more:  # replaces the truncating samplers
        on = [name for name in on if name in ("temperature", "penalties")]
    seed = None if body.seed is None or body.seed in (-1, 2**32 - 1) else body.seed
    return SamplingParams(
        n=body.n_cmpl or 1,
        temperature=max(settings.temperature, 0.0) if "temperature" in on else 1.0,
        top_k=max(settings.top_k, 0) if "top_k" in on else 0,
        top_p=settings.top_p if "top_p" in on and 0 < settings.top_p < 1 else 1.0,
        min_p=min(max(settings.min_p, 0.0), 1.0) if "min_p" in on else 0.0,
        seed=seed,
        stop=body.stop,
        ignore_eos=body.ignore_eos,
        max_tokens=None if limit is None or limit < 0 else max(limit, 1),
        logprobs=body.n_probs or None,
        logit_bias=bias,
        structured_outputs=constraint,
        output_kind=OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY,
        extra_args=_arguments(settings),
    )


def _arguments(settings: Settings) -> dict[str, Any] | None:
    """Settings of logits processors. Mirostat replaces the truncating samplers."""
    more = {
        name: value
        for name, value in settings.more.items()
        if "mirostat" not in settings.more or name.startswith(("mirostat", "dynatemp"))
    }
    return {**(_penalties(settings) or {}), **more} or None


def _penalties(settings: Settings) -> dict[str, Any] | None:
    """Options of the logits processor `recent_penalties`."""
    penalties = {
        "repeat": settings.repeat_penalty,
        "presence": settings.presence_penalty,
        "frequency": settings.frequency_penalty,
    }
    neutral = {"repeat": 1.0, "presence": 0.0, "frequency": 0.0}
    if penalties == neutral or not settings.repeat_last_n or "penalties" not in settings.samplers:
        return None
    return {"recent_penalties": {"last_n": settings.repeat_last_n, **penalties}}


def constraint_of(body: CompletionRequest) -> tuple[StructuredOutputs, str] | None:
    """The request's constraint with its field, or None. Raises ApiError(400)."""
    if body.grammar and body.json_schema is not None:
        raise bad_field("grammar", "grammar cannot be combined with json_schema")
    if body.grammar:
        constraint = from_structured(StructuredFields(grammar=body.grammar), "grammar")
        return None if constraint is None else (constraint, "grammar")
    if body.json_schema is None:
        return None
    check_schema(body.json_schema, "json_schema")
    if not body.json_schema:
        return StructuredOutputs(json_object=True), "json_schema"
    return StructuredOutputs(json=body.json_schema), "json_schema"
